"""How much memory a training step of a model needs, on which device, and for what."""

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

from tfdist.memory.application import applied, contents_of, under
from tfdist.memory.estimation.batch import assumed, batch_of, specifications_of
from tfdist.memory.estimation.checks import check_estimable, check_not_streamed, check_one_batch
from tfdist.memory.estimation.choosing import choose_for
from tfdist.memory.estimation.estimate import DeviceMemory, estimate
from tfdist.memory.estimation.measured_step import measure
from tfdist.memory.estimation.picture import save_picture
from tfdist.memory.estimation.traced_step import GRADIENTS, OPTIMIZER, OTHER
from tfdist.memory.policy import MemoryPolicy, policy_of
from tfdist.plain_text import plain_text
from tfdist.strategies.host_offload import HostOffloadStrategy

_SMALL = 1e6
_LEGEND = "Indented: what is held of each at the moment of the step's peak, not the most that each holds."


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
        save_picture(path, self)


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
    check_one_batch(batch_size, data)
    batch = None if data is None else specifications_of(data)
    check_estimable(model, "report", batch)
    batch = batch_of(model, batch_size) if batch is None else batch
    if policy is not None:
        check_not_streamed(model, "mode 'stream' is the only one, and what is reported without a policy")
    policy = policy_of(policy) or applied(model) or getattr(model.distribute_strategy, "memory", None)
    if policy is not None and policy.is_automatic:
        policy = choose_for(model, batch, policy).policy
    # That one has blocks of its own.
    streams = isinstance(model.distribute_strategy, HostOffloadStrategy)
    guess = assumed(batch) if data is None else contextlib.nullcontext()
    with guess, contextlib.nullcontext() if streams else under(model, policy):
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
