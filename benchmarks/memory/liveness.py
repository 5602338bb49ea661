"""What a traced function holds on each device at its peak, from the trace of a run.

TensorFlow tells when each operation began and ended, and where its results were. A buffer lives from the begin of the
operation that makes it to the end of the last one that reads it, under whatever name. Between logical CPU devices a
tensor is sent without a copy; here it is counted where it is received, too, as it would be on an accelerator.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction

from tfdist.memory.estimate import short_device

v1 = tf.compat.v1
# What they return is there before and after: variables, arguments and constants.
_RESIDENT = frozenset({"ReadVariableOp", "VarHandleOp", "Const", "_Arg", "Placeholder"})


@dataclasses.dataclass(frozen=True)
class Held:
    """What one device holds.

    Attributes:
        peak: bytes that the function has made or received, at the most.
        resident: bytes that are there all the time.
        largest: the buffers at the peak, as (bytes, name of an operation).
    """

    peak: int
    resident: int
    largest: list[tuple[int, str]]


def held_in_step(model: keras.Model, x: np.ndarray, y: np.ndarray, name: str = "train_step") -> dict[str, Held]:
    """What is held by device in one step of a compiled model, under its strategy.

    Args:
        model: trained before, so that all its variables are there.
        x: inputs.
        y: targets.
        name: of the model's method: "train_step" or "test_step".
    """

    @tf.function(autograph=False)
    def step(x: tf.Tensor, y: tf.Tensor) -> Any:
        return model.distribute_strategy.run(getattr(model, name), args=((x, y),))

    return held(step.get_concrete_function(tf.TensorSpec(x.shape), tf.TensorSpec(y.shape)), (x, y))


def held(function: ConcreteFunction, arguments: Sequence[np.ndarray]) -> dict[str, Held]:
    """Runs a function twice, on the values that its variables have now, and follows the second run.

    Args:
        function: a traced function of tensors.
        arguments: of the function.

    Returns:
        What is held by device: "CPU:0".
    """
    metadata = _run(function, arguments)
    times = {
        (short_device(device.device), node.node_name): node
        for device in metadata.step_stats.dev_stats
        for node in device.node_stats
    }
    sources = {
        _channel(node): (short_device(node.device), *_split(next(_data_inputs(node))))
        for partition in metadata.partition_graphs
        for node in partition.node
        if node.op in ("_Send", "_HostSend")
    }
    found = {}
    for partition in metadata.partition_graphs:
        device = next(short_device(node.device) for node in partition.node if node.device)
        found[device] = _Partition(device, partition, times, sources).held()
    return found


def _run(function: ConcreteFunction, arguments: Sequence[np.ndarray]) -> Any:
    """Runs the function's graph in a session: only there TensorFlow tells it all."""
    variables = {id(v.handle): (v, v.numpy()) for v in function.graph.variables}
    definition = function.graph.as_graph_def()
    graph, values, begin, feeds = v1.Graph(), {}, [], {}
    with graph.as_default():
        for outside, inside in function.graph.captures:
            if inside.dtype == tf.resource:
                variable, value = variables[id(outside)]
                with tf.device(variable.device):
                    handle = tf.raw_ops.VarHandleOp(
                        dtype=variable.dtype, shape=variable.shape, shared_name=inside.op.name, container=""
                    )
                given = v1.placeholder(variable.dtype, variable.shape)
                # What is fed has no address, and a variable would keep it as it is.
                copy = tf.raw_ops.DeepCopy(x=given)
                begin.append((tf.raw_ops.AssignVariableOp(resource=handle, value=copy), {given: value}))
                values[inside.name] = handle
            else:
                values[inside.name] = tf.constant(outside.numpy())
        for inside, argument in zip(function.graph.inputs, arguments, strict=False):
            given = v1.placeholder(inside.dtype, inside.shape)
            feeds[given] = argument
            values[inside.name] = given
        # What is mapped to something else is no operation of this graph: there is nothing to wait for.
        absent = {f"^{name.partition(':')[0]}" for name in values}
        for node in definition.node:
            kept = [name for name in node.input if name not in absent]
            node.ClearField("input")
            node.input.extend(kept)
        results = [*(t.name for t in function.graph.outputs), *(op.name for op in function.graph.control_outputs)]
        wanted = tf.graph_util.import_graph_def(definition, input_map=values, return_elements=results, name="run")
    targets = [item.op if isinstance(item, tf.Tensor) else item for item in wanted]
    # Several threads compute what is ready in any order: what is there at a time would differ from run to run.
    count = {"CPU": len(tf.config.list_logical_devices("CPU"))}
    config = v1.ConfigProto(
        device_count=count, inter_op_parallelism_threads=1, intra_op_parallelism_threads=1, allow_soft_placement=True
    )
    options = v1.RunOptions(trace_level=v1.RunOptions.FULL_TRACE, output_partition_graphs=True)
    with v1.Session(graph=graph, config=config) as session:
        for assign, given in begin:
            session.run(assign, given)
        session.run(targets, feeds)
        metadata = v1.RunMetadata()
        session.run(targets, feeds, options=options, run_metadata=metadata)
    return metadata


@dataclasses.dataclass
class _Buffer:
    size: int
    address: int
    name: str
    begin: int
    end: int
    resident: bool = False


class _Partition:
    """The operations of one device."""

    def __init__(self, device: str, definition: Any, times: dict, sources: dict):
        self._device, self._nodes = device, definition.node
        self._times, self._sources = times, sources
        self._buffers: dict[tuple[str, int], _Buffer] = {}

    def held(self) -> Held:
        for node in _ordered(self._nodes):
            inputs = [self._buffers[key] for key in map(_split, _data_inputs(node)) if key in self._buffers]
            stats = self._times.get((self._device, node.name))
            if stats is not None:
                for buffer in inputs:
                    buffer.end = max(buffer.end, stats.all_start_micros + stats.all_end_rel_micros)
            if node.op in ("_Recv", "_HostRecv"):
                self._receive(node)
            elif stats is not None:
                self._make(node, stats, inputs)
        return self._peak({id(buffer): buffer for buffer in self._buffers.values()}.values())

    def _receive(self, node: Any) -> None:
        """A copy, which arrives as soon as it is sent."""
        device, name, slot = self._sources[_channel(node)]
        sender = self._times.get((device, name))
        if sender is None:
            return
        for output in sender.output:
            size, address = _allocation(output)
            if output.slot == slot and size:
                sent = max(sender.all_start_micros + sender.all_end_rel_micros, self._released(node, device))
                self._buffers[node.name, 0] = _Buffer(size, address, node.name, sent, sent)

    def _released(self, node: Any, device: str) -> int:
        """When the sender was let go by what it waits for."""
        waits = [name[1:] for name in node.input if name.startswith("^")]
        stats = [self._times.get((self._device, name)) for name in waits]
        return max((s.all_start_micros + s.all_end_rel_micros for s in stats if s is not None), default=0)

    def _make(self, node: Any, stats: Any, inputs: list[_Buffer]) -> None:
        for output in stats.output:
            size, address = _allocation(output)
            if not size:
                continue
            end = stats.all_start_micros + stats.all_end_rel_micros
            # The same address: another name, or the result has taken its place.
            same = next((buffer for buffer in inputs if buffer.address == address), None)
            buffer = same or _Buffer(size, address, node.name, stats.all_start_micros, end, node.op in _RESIDENT)
            self._buffers[node.name, output.slot] = buffer

    def _peak(self, buffers: Iterable[_Buffer]) -> Held:
        buffers = list(buffers)
        resident = {buffer.address: buffer.size for buffer in buffers if buffer.resident}
        made = [buffer for buffer in buffers if not buffer.resident]
        # What ends when another one begins is there together with it: the peak is rather too high than too low.
        changes = sorted((time, -size) for b in made for time, size in ((b.begin, b.size), (b.end, -b.size)))
        now = peak = at = 0
        for time, negative in changes:
            now -= negative
            if now > peak:
                peak, at = now, time
        largest = sorted(((b.size, b.name) for b in made if b.begin <= at <= b.end), reverse=True)
        return Held(peak, sum(resident.values()), largest)


def _ordered(nodes: Sequence[Any]) -> list[Any]:
    """The operations of a partition, each after those whose results it reads."""
    known = {node.name: node for node in nodes}
    waiting = {node.name: {_split(name)[0] for name in _data_inputs(node)} & known.keys() for node in nodes}
    readers = collections.defaultdict(list)
    for name, needed in waiting.items():
        for before in needed:
            readers[before].append(name)
    ready = collections.deque(name for name, needed in waiting.items() if not needed)
    order = []
    while ready:
        name = ready.popleft()
        order.append(known[name])
        for reader in readers[name]:
            waiting[reader].discard(name)
            if not waiting[reader]:
                ready.append(reader)
    return order


def _data_inputs(node: Any) -> Iterable[str]:
    return (name for name in node.input if not name.startswith("^"))


def _split(name: str) -> tuple[str, int]:
    operation, _, slot = name.partition(":")
    return operation, int(slot or 0)


def _channel(node: Any) -> tuple[bytes, ...]:
    return tuple(node.attr[key].s for key in ("tensor_name", "send_device", "recv_device"))


def _allocation(output: Any) -> tuple[int, int]:
    description = output.tensor_description.allocation_description
    return description.allocated_bytes or description.requested_bytes, description.ptr
