"""How much memory a training step of a model needs, on which device, and for what: a table, and a picture."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tfdist.compat.hooks import hooks_of
from tfdist.memory.estimation.choosing import choose_for
from tfdist.memory.estimation.estimate import DeviceMemory, estimate, measure
from tfdist.memory.estimation.trace import GRADIENTS, OPTIMIZER, OTHER
from tfdist.memory.estimation.validation import batch_from, check_not_streamed
from tfdist.memory.modes import applied, contents_of, under
from tfdist.memory.policy import MemoryPolicy, policy_of
from tfdist.plain_text import plain_text

_WIDTH, _HEIGHT = 9.0, 3.6  # in inches; the height of one device
_POINTS = 1500  # more cannot be told apart
_NAMED_BLOCKS = 8
_VISIBLE = 0.002
_MB = 1e6
_COLOURS = {
    "weights": "0.4",
    "optimizer slots": "0.6",
    "batch": "0.8",
    GRADIENTS: "tab:red",
    OPTIMIZER: "tab:orange",
    OTHER: "tab:pink",
}
_SMALL = 1e6
_LEGEND = "Indented: what is held of each at the moment of the step's peak, not the most that each holds."


def save_picture(
    path: str | os.PathLike[str], title: str, devices: Sequence[DeviceMemory], blocks: Sequence[str]
) -> None:
    """Draws a panel for each device: what is there all the time at the bottom, and the step by blocks on top.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "MemoryReport.plot draws with matplotlib, which cannot be imported: pip install 'matplotlib>=3.7'"
        ) from error

    devices = [device for device in devices if device.total]
    colours = colormaps["viridis"].resampled(max(len(blocks), 2))
    colour_of = {**_COLOURS, **{block: colours(position) for position, block in enumerate(blocks)}}
    labels = ["weights", "optimizer slots", "batch", *blocks, GRADIENTS, OPTIMIZER, OTHER]
    # The legend has no room for all blocks.
    named = {*_COLOURS, *_some(blocks)}
    figure = Figure(figsize=(_WIDTH, _HEIGHT * len(devices)), layout="constrained")
    for axes, device, line in zip(
        figure.subplots(len(devices), squeeze=False)[:, 0], devices, _moments(devices), strict=True
    ):
        axes.stackplot(
            range(len(line)),
            [[moment.get(label, 0) / _MB for moment in line] for label in labels],
            labels=[label if label in named else f"_{label}" for label in labels],
            colors=[colour_of[label] for label in labels],
            linewidth=0,
        )
        total = device.total / _MB
        axes.axhline(total, color="black", linewidth=0.6, linestyle="--")
        axes.text(0, total, f" {total:.4g} MB", va="bottom", fontsize=8)
        top = total
        if device.measured is not None:
            measured = (device.total - device.step + device.measured) / _MB
            axes.axhline(measured, color="tab:red", linewidth=0.8, linestyle=":", label="_measured")
            # Away from the line of the estimate.
            side = {"va": "top" if measured < total else "bottom", "ha": "right"}
            axes.text(len(line) - 1, measured, f"measured: {measured:.4g} MB ", fontsize=8, **side)
            top = max(total, measured)
        axes.set(ylabel=f"{device.device}, MB", xlim=(0, max(len(line) - 1, 1)), ylim=(0, 1.12 * top), xticks=[])
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8, reverse=True, frameon=False)
    axes.set_xlabel("forward and backward pass, operation by operation")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)


def _moments(devices: Sequence[DeviceMemory]) -> list[list[dict[str, int]]]:
    """For each device, bytes by label in the course of the step: where they change visibly, and not too often."""
    lines = [device.timeline or [{}] for device in devices]
    length = max(map(len, lines))
    lines = [line if len(line) == length else [{}] * length for line in lines]
    changes = [0]
    for i in range(1, length):
        if any(
            _difference(line[i], line[changes[-1]]) > _VISIBLE * device.step
            for line, device in zip(lines, devices, strict=True)
        ):
            changes.append(i)
    stride = -(-len(changes) // _POINTS)
    stretches = [changes[begin : begin + stride] for begin in range(0, len(changes), stride)]
    found = []
    for device, line in zip(devices, lines, strict=True):
        # Of each stretch, the moment with the most bytes, so that the peak is in the picture.
        most = [max((line[i] for i in stretch), key=_sum) for stretch in stretches]
        # `at_peak` includes what an operation needs while it runs; the moments do not.
        most[most.index(max(most, key=_sum))] = device.at_peak
        resident = {"weights": device.weights, "optimizer slots": device.slots, "batch": device.batch}
        found.append([{**resident, **moment} for moment in most])
    return found


def _difference(now: dict[str, int], before: dict[str, int]) -> int:
    return sum(abs(now.get(label, 0) - before.get(label, 0)) for label in now.keys() | before.keys())


def _sum(moment: dict[str, int]) -> int:
    return sum(moment.values())


def _some(blocks: Sequence[str]) -> Sequence[str]:
    """Blocks at equal distances, as many as a legend has room for."""
    return blocks[:: -(-len(blocks) // _NAMED_BLOCKS) or 1]


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryReport:
    """What each device holds in a training step. Print it for a table.

    Attributes:
        model: name of the model.
        rows: of the batch.
        policy: what is kept; `None` for everything.
        blocks: names of the model's blocks, in their order.
        devices: those that hold something, those of the replicas first.
        layers: the first and the last layer of each block, by its name; nothing where blocks are layers.
    """

    model: str
    rows: int
    policy: MemoryPolicy | None
    blocks: Sequence[str]
    devices: Sequence[DeviceMemory]
    layers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __getitem__(self, device: str) -> DeviceMemory:
        """The device with this name, such as "GPU:0"."""
        found = {memory.device: memory for memory in self.devices}
        if device not in found:
            raise KeyError(f"Received: {device!r}. Expected: one of {', '.join(found)}.")
        return found[device]

    def __repr__(self) -> str:
        return str(self)

    @property
    def title(self) -> str:
        """What the report is about."""
        return f"A training step of '{self.model}', {self.rows} rows, {_described(self.policy)}"

    def __str__(self) -> str:
        small = all(device.total < _SMALL for device in self.devices)
        unit, size_of_unit = ("kB", 1e3) if small else ("MB", 1e6)
        table = Table(box=SIMPLE_HEAD)
        table.add_column(unit)

        def row(name: str, sizes: Iterable[int | None], *more: str) -> None:
            table.add_row(name, *("" if size is None else f"{size / size_of_unit:.2f}" for size in sizes), *more)

        for device in self.devices:
            table.add_column(device.device, justify="right")
        if self.layers:
            table.add_column("layers", no_wrap=True)
        row("weights", (device.weights for device in self.devices))
        row("optimizer slots", (device.slots for device in self.devices))
        row("batch", (device.batch for device in self.devices))
        row("step, at its peak", (device.step for device in self.devices))
        for label in (*self.blocks, GRADIENTS, OPTIMIZER, OTHER):
            sizes = (device.at_peak.get(label, 0) for device in self.devices)
            row(f"  {label}", sizes, *([self.layers.get(label, "")] if self.layers else []))
        row("all", (device.total for device in self.devices))
        if any(device.measured is not None for device in self.devices):
            row("step, measured", (device.measured for device in self.devices))
        return f"{self.title}\n\n{plain_text(table)}\n\n{_LEGEND}"

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws what each device holds in the course of the step.

        Args:
            path: file to write; its ending, such as `.png` or `.svg`, says in which format.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        save_picture(path, self.title, self.devices, self.blocks)


def report(
    model: keras.Model,
    batch_size: int | None = None,
    policy: MemoryPolicy | str | None = None,
    *,
    data: Any = None,
    measured: bool = False,
) -> MemoryReport:
    """Estimates the memory of a training step from its graph, without running it.

    The graph is what TensorFlow would run: it is traced with the policy, and each operation takes memory for what it
    makes, until nobody needs that any more. What kernels need inside of themselves is not known, nor what recurrent
    layers keep in their loops.

    Args:
        model: a compiled model that is built, under no strategy, `MirroredStrategy`, `MultiWorkerMirroredStrategy`
            (called by all workers, and reporting on the devices of its own) or `HostOffloadStrategy`.
        batch_size: rows of the global batch, as in `fit`.
        policy: what is kept; by default what was applied to the model. The model's own policy is not changed. Under
            `HostOffloadStrategy`, whose blocks are all streamed, none.
        data: a batch `(x, y)` or `(x, y, sample_weight)` of arrays, for models that do not tell the shapes of all of
            them; instead of `batch_size`. A model that is not built is built from it.
        measured: whether to run some steps, on zeros, and measure the peak of their memory. Weights, slots and metrics
            are put back.

    Raises:
        ValueError: if shapes are not known, the policy does not fit the model, or the strategy is another one.
        RuntimeError: if `measured` and TensorFlow does not count the memory of any device; says what to do.

    Example:
        >>> import keras, tfdist
        >>> model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, "relu") for _ in range(9))])
        >>> model.compile("adam", "mse")
        >>> [device.device for device in tfdist.memory.report(model, 32, "recompute").devices]
        ['CPU:0']
    """
    with batch_from(model, "report", batch_size, data) as batch:
        return _report(model, batch, policy, measured)


def _report(model: keras.Model, batch: Any, policy: MemoryPolicy | str | None, measured: bool) -> MemoryReport:
    if policy is not None:
        check_not_streamed(model, "mode 'stream' is the only one, and what is reported without a policy")
    policy = policy_of(policy) or applied(model) or getattr(model.distribute_strategy, "_memory", None)
    if policy is not None and policy.is_automatic:
        policy = choose_for(model, batch, policy).policy
    # Such a strategy has applied a policy of its own: there is none to put in its place.
    streams = hooks_of(model.distribute_strategy).streams_weights
    with contextlib.nullcontext() if streams else under(model, policy):
        estimated = estimate(model, batch)
        found = measure(model, batch) if measured else {}
        used = applied(model) if streams else policy
    devices = [dataclasses.replace(device, measured=found.get(device.device)) for device in estimated.devices]
    return MemoryReport(
        model.name,
        keras.tree.flatten(batch)[0].shape[0],
        used,
        list(dict.fromkeys(estimated.traced.forward.values())),
        devices,
        contents_of(model, used or MemoryPolicy("none")),
    )


def _described(policy: MemoryPolicy | None) -> str:
    if policy is None or set(policy.modes) <= {"none"}:
        return "everything is kept"
    if isinstance(policy.mode, str):
        return f"mode {policy.mode!r}"
    modes = Counter(policy.modes)
    return "modes " + ", ".join(f"{mode!r} ({count})" for mode, count in modes.items())
