"""What the blocks of a model keep and compute in a step that keeps everything."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tfdist.layer_graph.costs import FLOPS_PER_BYTE, flops_of
from tfdist.memory.estimation.assignment import Option
from tfdist.memory.estimation.estimate import Estimate
from tfdist.memory.estimation.execution_order import as_made
from tfdist.memory.estimation.liveness import simulate
from tfdist.memory.estimation.operation import Operation
from tfdist.memory.estimation.rates import Rates


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


def block_costs(plain: Estimate) -> list[BlockCost]:
    """The blocks on the first replica's device, in the order of the forward pass.

    Args:
        plain: of a step with mode "none" for all blocks.
    """
    device, block_of = plain.devices[0].device, plain.traced.forward
    operations = plain.operations
    kept = _kept(operations, device, block_of)
    inputs = _inputs(operations, device, block_of)
    flops: collections.Counter[str] = collections.Counter()
    here = {op.name for op in operations if op.device == device}
    for operation in plain.traced.graph.get_operations():
        if operation.name in block_of and operation.name in here:
            flops[block_of[operation.name]] += flops_of(operation)
    for op in operations:
        if op.name in block_of and op.device == device and not op.is_view:
            flops[block_of[op.name]] += FLOPS_PER_BYTE * sum(op.sizes)
    return [BlockCost(name, kept.get(name, 0), inputs[name], flops[name]) for name in dict.fromkeys(block_of.values())]


def options(costs: Sequence[BlockCost], rates: Rates, with_host: bool) -> list[list[Option]]:
    """What may be done with each block.

    A block that is run again adds its forward pass. What goes to the host and back adds what takes longer than the
    computation beside it: the forward pass of a block on the way out, the backward pass, twice as long, on the way
    back.

    Args:
        costs: of the blocks.
        rates: of the device.
        with_host: whether the host takes something, as another device.
    """
    found = []
    for position, cost in enumerate(costs):
        compute = cost.flops / rates.flops

        def on_link(size: float, compute: float = compute) -> float:
            return max(0.0, size / rates.link - compute) + max(0.0, size / rates.link - 2 * compute)

        of_block = [Option("none", cost.kept, cost.kept, 0.0)]
        if cost.kept > cost.inputs:
            of_block.append(Option("recompute", cost.inputs, cost.inputs + cost.kept, compute))
        if with_host:
            # What is fetched ahead is there, too.
            ahead = costs[max(0, position - 1)]
            of_block.append(Option("park", 0.0, cost.kept + ahead.inputs, compute + on_link(cost.inputs)))
            of_block.append(Option("swap", 0.0, cost.kept + ahead.kept, on_link(cost.kept)))
        found.append(of_block)
    return found


def _kept(operations: Sequence[Operation], device: str, block_of: Mapping[str, str]) -> Mapping[str, int]:
    """Bytes by block when the forward pass is over."""
    order = as_made(operations)
    last = max(place for place, position in enumerate(order) if operations[position].name in block_of)
    return simulate(operations, order)[device].timeline[last]


def _inputs(operations: Sequence[Operation], device: str, block_of: Mapping[str, str]) -> collections.Counter[str]:
    """Bytes by block of the tensors that other operations have made for it."""
    maker = {tensor: op for op in operations for tensor in op.outputs}
    size = {tensor: size for op in operations for tensor, size in zip(op.outputs, op.sizes, strict=True)}
    found: collections.Counter[str] = collections.Counter()
    seen: set[tuple[int, str]] = set()
    for op in operations:
        block = block_of.get(op.name)
        if block is None or op.device != device:
            continue
        for tensor in op.inputs:
            source = tensor
            while source in maker and maker[source].is_view and maker[source].inputs:
                source = maker[source].inputs[0]
            # Weights, constants and the batch are there anyhow.
            if source not in maker or maker[source].is_view or (source, block) in seen:
                continue
            seen.add((source, block))
            if block_of.get(maker[source].name) != block:
                found[block] += size[source]
    return found
