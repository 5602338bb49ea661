"""Which blocks to run again so that a training step fits a budget (`choose`), and what it needs, as a table (`report`).

The backward pass goes from the last block to the first one. When it has reached a block, this one needs all that it
makes (and, if it is run again, its inputs), each block before it still has what it keeps, and the blocks after it have
released everything:

    kept by block 0 | kept by block 1 | needed by block 2
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import glob
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tfdist.compat.keras import hooks_of
from tfdist.layer_graph.costs import FLOPS_PER_BYTE, flops_of
from tfdist.memory.estimate import (
    GRADIENTS,
    MARGIN,
    OPTIMIZER,
    OTHER,
    DeviceMemory,
    Estimate,
    Operation,
    Run,
    as_made,
    batch_from,
    estimate,
)
from tfdist.memory.modes import applied, check_not_streamed, contents_of, under
from tfdist.memory.policy import MemoryPolicy, bytes_of_budget, policy_of
from tfdist.plain_text import plain_text

_log = logging.getLogger("tfdist")
# One keeps everything, the last one as little as can be.
_TRACES = 5


class BlockCost(NamedTuple):
    """One block of a model.

    Attributes:
        name: its name.
        kept: bytes of what it leaves for the backward pass.
        inputs: bytes of what goes into it.
        flops: operations of its forward pass, and ten for each byte that it makes.
    """

    name: str
    kept: float
    inputs: float
    flops: float


def peak(blocks: Sequence[BlockCost], again: Collection[int]) -> float:
    """Bytes at the peak of the backward pass, if blocks with these numbers are run again.

    Example:
        >>> peak([BlockCost("a", kept=8, inputs=1, flops=1)] * 2, {0})
        9.0
    """
    before = most = 0.0
    for number, block in enumerate(blocks):
        is_again = number in again
        most = max(most, before + block.kept + is_again * block.inputs)
        before += block.inputs if is_again else block.kept
    return most


def assign(blocks: Sequence[BlockCost], limit: float) -> set[int] | None:
    """Numbers of blocks that are run again, with which a step fits into a limit, for little added time.

    At first all blocks keep everything. As long as that is too much, the block is run again that makes the peak lower
    for the fewest operations a byte.

    Returns `None` if none are found.

    Example:
        >>> blocks = [BlockCost("a", kept=8, inputs=1, flops=1)] * 2
        >>> assign(blocks, 16), assign(blocks, 10), assign(blocks, 8)
        (set(), {0}, None)
    """
    again: set[int] = set()
    while (now := peak(blocks, again)) > limit:
        lower = {number: now - peak(blocks, {*again, number}) for number in _saving(blocks) - again}
        found = [number for number, saved in lower.items() if saved > 0]
        if not found:
            return None
        again.add(min(found, key=lambda number: (blocks[number].flops / lower[number], number)))
    return again


def _saving(blocks: Sequence[BlockCost]) -> set[int]:
    """Numbers of the blocks that save something where they are run again; the backward pass begins with the last."""
    return {number for number, block in enumerate(blocks[:-1]) if block.kept > block.inputs}


def block_costs(plain: Estimate) -> list[BlockCost]:
    """The blocks on the first replica's device, in the order of the forward pass, from a step that keeps everything."""
    device, block_of = plain.devices[0].device, plain.forward
    kept = _kept(plain.operations, device, block_of)
    inputs = _inputs(plain.operations, device, block_of)
    flops: collections.Counter[str] = collections.Counter()
    for op in plain.operations:
        if op.name in block_of and op.device == device and not op.is_view:
            node = plain.graph.get_operation_by_name(op.name)
            flops[block_of[op.name]] += flops_of(node) + FLOPS_PER_BYTE * sum(op.sizes)
    return [BlockCost(name, kept.get(name, 0), inputs[name], flops[name]) for name in dict.fromkeys(block_of.values())]


def _kept(operations: Sequence[Operation], device: str, block_of: Mapping[str, str]) -> Mapping[str, int]:
    """Bytes by block when the forward pass is over."""
    order = as_made(operations)
    last = max(place for place, position in enumerate(order) if operations[position].name in block_of)
    run = Run(operations)
    for position in order[: last + 1]:
        run.step(operations[position])
    return run.held(device)


def _inputs(operations: Sequence[Operation], device: str, block_of: Mapping[str, str]) -> collections.Counter[str]:
    """Bytes by block of the tensors that other operations have made for it."""
    maker = {tensor: op for op in operations for tensor in op.outputs}
    size = {tensor: size for op in operations for tensor, size in zip(op.outputs, op.sizes, strict=True)}

    def source(tensor: int) -> int:
        """What a view (of a view, ...) shows."""
        while tensor in maker and maker[tensor].is_view and maker[tensor].inputs:
            tensor = maker[tensor].inputs[0]
        return tensor

    ours = [(op, block_of[op.name]) for op in operations if op.name in block_of and op.device == device]
    found: collections.Counter[str] = collections.Counter()
    for tensor, block in {(source(tensor), block) for op, block in ours for tensor in op.inputs}:
        # Weights, constants and the batch take memory in any case.
        if tensor in maker and not maker[tensor].is_view and block_of.get(maker[tensor].name) != block:
            found[block] += size[tensor]
    return found


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and why. Print it for a table.

    Attributes:
        policy: to be applied.
        budget: bytes that a device may hold.
        plain: bytes that it would hold if everything was kept, with a margin for what the estimate does not know.
        chosen: bytes that it holds under the policy, with the same margin.
        blocks: what each block keeps and computes.
        layers: the first and the last layer of each block, by its name; nothing where blocks are layers.
    """

    policy: MemoryPolicy
    budget: int
    plain: int
    chosen: int
    blocks: Sequence[BlockCost]
    layers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def added(self) -> float:
        """Added time, as a share of the time of a step that keeps everything; a backward pass counts as two forward."""
        return sum(block.flops for block in self._again()) / (3 * (sum(block.flops for block in self.blocks) or 1))

    def _again(self) -> list[BlockCost]:
        return [block for block in self.blocks if self.policy.mode_of(block.name) != "none"]

    def __str__(self) -> str:
        flops, again = sum(block.flops for block in self.blocks) or 1.0, self._again()
        rows = []
        for block in self.blocks:
            numbers = [f"{block.kept / 1e6:.2f}", "", "0.0"]
            if block in again:
                numbers = [f"{block.inputs / 1e6:.2f}", numbers[0], f"{100 * block.flops / (3 * flops):.1f}"]
            rows.append([block.name, self.policy.mode_of(block.name), *numbers])
        table = _table(["block", "mode"], ["keeps, MB", "instead of, MB", "added time, %"], rows, self.layers)
        return f"{self.summary}\n\n{table}"

    @property
    def summary(self) -> str:
        """One line."""
        return (
            f"{len(self._again())} of {len(self.blocks)} blocks keep less: a step needs {self.chosen / 1e6:.4g} MB of "
            f"a budget of {self.budget / 1e6:.4g} MB (everything kept: {self.plain / 1e6:.4g} MB), and about "
            f"{100 * self.added:.0f} % more time."
        )


def choose(
    model: keras.Model, batch_size: int | None = None, policy: MemoryPolicy | None = None, *, data: Any = None
) -> Choice:
    """Chooses which blocks are run again so that the peak of a training step fits a budget at about the least time.

    Steps are estimated as by `tfdist.memory.report`, up to five of them (seconds for each, in a deep model), with a
    margin of a tenth for what they make. What `report` does not know is not in the budget: what loops of recurrent
    layers keep, and how XLA orders a step; a warning says so. Nothing is sent to the host. With several processes all
    of them call this, and choose the same.

    Args:
        model: as for `report`, but not under `HostOffloadStrategy`.
        batch_size: rows of the global batch, as in `fit`.
        policy: `MemoryPolicy("auto", budget="8GB")`, with blocks if they matter. The budget is what
            each device may hold: weights, slots, the batch, and what the step makes.
        data: a batch of arrays instead of `batch_size`, as for `report`.

    Returns:
        The choice, whose `policy` can be applied; nothing is applied here.

    Raises:
        ValueError: if not even the modes that keep the least fit: it says what they need; or as for `report`.

    Example:
        >>> import keras, tfdist
        >>> layers = [keras.Input((64,)), *(keras.layers.Dense(64, "gelu") for _ in range(9))]
        >>> model = keras.Sequential(layers)
        >>> model.compile("sgd", "mse")
        >>> choice = tfdist.memory.choose(model, 1024, tfdist.memory.MemoryPolicy("auto", budget="8 MB"))
        >>> choice.chosen <= 8e6 < choice.plain
        True
    """
    with batch_from(model, "choose", batch_size, data) as batch:
        return choose_for(model, batch, policy)


def choose_for(model: keras.Model, batch: Any, policy: MemoryPolicy) -> Choice:
    """Does what `choose` does, for a batch of these specifications."""
    if not isinstance(policy, MemoryPolicy) or not policy.is_automatic:
        raise ValueError(f"Received: policy={policy!r}. Expected: tfdist.memory.MemoryPolicy('auto', budget='8GB').")
    check_not_streamed(model)
    budget = bytes_of_budget(policy.budget)
    _log.info(
        "Model '%s': estimating a training step under 1 to %d plans, each of which is traced, to fit it into %s.",
        model.name,
        _TRACES,
        policy.budget,
    )

    def traced(tried: MemoryPolicy) -> Estimate:
        with under(model, tried):
            return estimate(model, batch)

    plain = traced(policy.with_modes("none"))
    _check_known(model, plain)
    blocks = block_costs(plain)
    used, again, least = policy.with_modes("none"), set(), _saving(blocks)
    needs = whole = _with_margin(plain)
    for trace in range(2, _TRACES + 1):
        if needs <= budget or again == least:
            break
        # The peak of the blocks differs from what a step needs by what is beside them, which the last trace has shown.
        found = assign(blocks, peak(blocks, again) - (needs - budget) / MARGIN)
        again = least if found is None or trace == _TRACES else found
        used = policy.with_modes({glob.escape(blocks[number].name): "recompute" for number in sorted(again)})
        needs = _with_margin(traced(used))
    if needs > budget:
        raise ValueError(
            f"Received: budget={policy.budget!r} for a step of model '{model.name}' that needs at least "
            f"{math.ceil(needs / 1e4) / 100} MB if all blocks are run again, with a margin of a tenth. Expected: "
            "a budget of that, a smaller batch, more and smaller blocks; or, if weights and slots are most of it, "
            "tfdist.HostOffloadStrategy, which keeps them on the host."
        )
    return Choice(used, budget, whole, needs, blocks, contents_of(model, used))


def _with_margin(estimated: Estimate) -> int:
    return max(round(device.total + (MARGIN - 1) * device.step) for device in estimated.devices if device.batch)


def _check_known(model: keras.Model, plain: Estimate) -> None:
    if not plain.forward:
        raise ValueError(
            f"Received: model '{model.name}', whose train step calls none of its blocks. Expected: a step that calls "
            "the model, or blocks=[...] with layers that it calls."
        )
    loops = any(operation.type in ("While", "StatelessWhile") for operation in plain.graph.get_operations())
    for known, what in ((not model.jit_compile, "how XLA orders a step"), (not loops, "what loops keep inside")):
        if not known:
            _log.warning(
                "Model '%s': %s is not estimated, and not in the budget. Measure the peak of a step.",
                model.name,
                what,
            )


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
        return {memory.device: memory for memory in self.devices}[device]

    def __repr__(self) -> str:
        sizes = [
            ("weights", [device.weights for device in self.devices]),
            ("optimizer slots", [device.slots for device in self.devices]),
            ("batch", [device.batch for device in self.devices]),
            ("step, at its peak", [device.step for device in self.devices]),
            *(
                (f"  {label}", [device.at_peak.get(label, 0) for device in self.devices])
                for label in (*self.blocks, GRADIENTS, OPTIMIZER, OTHER)
            ),
            ("all", [device.total for device in self.devices]),
        ]
        rows = [[name, *(f"{size / 1e6:.2f}" for size in by_device)] for name, by_device in sizes]
        table = _table(["MB"], [device.device for device in self.devices], rows, self.layers)
        title = f"A training step of '{self.model}', {self.rows} rows, {_described(self.policy)}"
        return f"{title}\n\n{table}\n\n{_LEGEND}"


def report(
    model: keras.Model,
    batch_size: int | None = None,
    policy: MemoryPolicy | str | None = None,
    *,
    data: Any = None,
) -> MemoryReport:
    """Estimates the memory of a training step from its graph, without running it.

    The graph is what TensorFlow would run: it is traced with the policy, and each operation takes memory for what it
    makes, until the last operation has read it. The estimate does not know what kernels need inside, nor what recurrent
    layers keep in their loops.

    Args:
        model: a compiled model that is built, under no strategy, `MirroredStrategy`, `MultiWorkerMirroredStrategy`
            (called by all workers, and reporting on the devices of its own) or `HostOffloadStrategy`.
        batch_size: rows of the global batch, as in `fit`.
        policy: what is kept; by default what was applied to the model. The model's own policy is not changed. Under
            `HostOffloadStrategy`, whose blocks are all streamed, none.
        data: a batch `(x, y)` or `(x, y, sample_weight)` of arrays, for models that do not tell the shapes of all of
            them; instead of `batch_size`. A model that is not built is built from it.

    Raises:
        ValueError: if shapes are not known, the policy does not fit the model, or the strategy is another one.

    Example:
        >>> import keras, tfdist
        >>> model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, "relu") for _ in range(9))])
        >>> model.compile("adam", "mse")
        >>> [device.device for device in tfdist.memory.report(model, 32, "recompute").devices]
        ['CPU:0']
    """
    with batch_from(model, "report", batch_size, data) as batch:
        if policy is not None:
            check_not_streamed(model)
        policy = policy_of(policy) or applied(model) or hooks_of(model.distribute_strategy).memory
        if policy is not None and policy.is_automatic:
            policy = choose_for(model, batch, policy).policy
        # Such a strategy has applied a policy of its own: there is none to put in its place.
        streams = hooks_of(model.distribute_strategy).streams_weights
        with contextlib.nullcontext() if streams else under(model, policy):
            estimated = estimate(model, batch)
            used = applied(model) if streams else policy
    return MemoryReport(
        model.name,
        keras.tree.flatten(batch)[0].shape[0],
        used,
        list(dict.fromkeys(estimated.forward.values())),
        estimated.devices,
        contents_of(model, used or MemoryPolicy("none")),
    )


def _table(
    names: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[str]], layers: Mapping[str, str]
) -> str:
    """Rows under these columns, and the layers of the block that the first column names, if any are known."""
    table = Table(box=SIMPLE_HEAD)
    for name in (*names, *numbers):
        table.add_column(name, justify="right" if name in numbers else "left")
    if layers:
        table.add_column("layers", no_wrap=True)
    for row in rows:
        table.add_row(*row, *([layers.get(row[0].strip(), "")] if layers else []))
    return plain_text(table)


def _described(policy: MemoryPolicy | None) -> str:
    if policy is None or set(policy.modes) <= {"none"}:
        return "everything is kept"
    return f"mode {policy.mode!r}" if isinstance(policy.mode, str) else f"modes {', '.join(policy.modes)}"
