"""What may be done with each block of a model, what that costs, and which options fit into a limit."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfdist.layer_graph.costs import FLOPS_PER_BYTE, flops_of, seconds_of
from tfdist.memory.estimation.estimate import Estimate
from tfdist.memory.estimation.liveness import Operation, as_made, simulate

_SIDE = 1024  # rows and columns of the matrices that are multiplied
_BYTES = 1 << 25  # copied to measure the link
# Bytes are rounded up to a multiple of this fraction of the limit: 1 / _PARTS.
_PARTS = 1024


class Rates(NamedTuple):
    """What a device does in a second.

    Attributes:
        flops: operations in single precision.
        link: bytes from or to the host.
    """

    flops: float
    link: float


def measured_rates(device: str, host: str) -> Rates:
    """Measures a device and its link to the host, in some tenths of a second.

    Args:
        device: the device.
        host: what takes what does not stay there.

    Example:
        >>> measured_rates("CPU:0", "CPU:0").flops > 1e8
        True
    """
    with tf.device(device):
        matrix = tf.random.stateless_uniform([_SIDE, _SIDE], [0, 0])
        block = tf.zeros([_BYTES // 4])

    def multiply() -> tf.Tensor:
        with tf.device(device):
            return tf.matmul(matrix, matrix)

    def copy() -> tf.Tensor:
        with tf.device(host):
            return block + 0.0

    return Rates(2.0 * _SIDE**3 / seconds_of(multiply), _BYTES / seconds_of(copy))


class Option(NamedTuple):
    """What may be done with a block.

    Attributes:
        mode: its name.
        kept: bytes that stay on the device from the block's forward to its backward pass.
        needed: bytes that the block needs in its backward pass, `kept` included.
        seconds: what it adds to a step.
    """

    mode: str
    kept: float
    needed: float
    seconds: float


def assign(blocks: Sequence[Sequence[Option]], limit: float) -> list[Option] | None:
    """The options that add the least time, of those with which the step fits into the limit.

    The backward pass goes from the last block to the first one. When it has reached a block, this one needs `needed`,
    each block before it still has `kept`, and the blocks after it have released everything.

        kept by block 0 | kept by block 1 | needed by block 2 |        <= limit, for every block

    This is a knapsack with a capacity for each block, and is solved by dynamic programming over what is kept so far.

    Args:
        blocks: the options of each block, in the order of the forward pass.
        limit: in bytes.

    Returns:
        An option for each block; `None` if nothing fits.

    Example:
        >>> blocks = [[Option("none", 8, 8, 0.0), Option("recompute", 1, 8, 1.0)]] * 2
        >>> [option.mode for option in assign(blocks, 16)], [option.mode for option in assign(blocks, 10)]
        (['none', 'none'], ['recompute', 'none'])
    """
    if limit <= 0:
        return None
    # For each number of parts that are kept so far: the least added time, and the options that lead there.
    best: dict[int, tuple[float, list[Option]]] = {0: (0.0, [])}
    for options in blocks:
        following: dict[int, tuple[float, list[Option]]] = {}
        for parts, (seconds, chosen) in best.items():
            for option in options:
                if parts * limit / _PARTS + option.needed > limit:
                    continue
                now = parts + math.ceil(option.kept / limit * _PARTS)
                if now not in following or seconds + option.seconds < following[now][0]:
                    following[now] = seconds + option.seconds, [*chosen, option]
        best = following
    return min(best.values(), key=lambda found: found[0])[1] if best else None


def peak(options: Sequence[Option]) -> float:
    """Bytes at the peak of the backward pass, if these are taken.

    Example:
        >>> peak([Option("recompute", 1, 8, 1.0), Option("none", 8, 8, 0.0)])
        9.0
    """
    kept, found = 0.0, 0.0
    for option in options:
        found = max(found, kept + option.needed)
        kept += option.kept
    return found


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
    """The blocks on the first replica's device, in the order of the forward pass, from a step that keeps everything."""
    device, block_of = plain.devices[0].device, plain.traced.forward
    kept = _kept(plain.operations, device, block_of)
    inputs = _inputs(plain.operations, device, block_of)
    flops: collections.Counter[str] = collections.Counter()
    for op in plain.operations:
        if op.name in block_of and op.device == device and not op.is_view:
            node = plain.traced.graph.get_operation_by_name(op.name)
            flops[block_of[op.name]] += flops_of(node) + FLOPS_PER_BYTE * sum(op.sizes)
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
            # While a block goes back, the tensors of the block before it are fetched already.
            ahead = costs[max(0, position - 1)]
            of_block.append(Option("recompute+swap", 0.0, cost.kept + ahead.inputs, compute + on_link(cost.inputs)))
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
            # Weights, constants and the batch take memory in any case.
            if source not in maker or maker[source].is_view or (source, block) in seen:
                continue
            seen.add((source, block))
            if block_of.get(maker[source].name) != block:
                found[block] += size[source]
    return found
