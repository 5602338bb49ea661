"""Runs the chunks of one pipeline on its micro-batches, as operations of one TensorFlow graph.

A whole training step is one graph. Each instruction of the schedule adds a call of one function to it, on the device of
its stage. For two stages and two micro-batches in 1F1B:

    stage 0   F0 ──> F1 ─────────> B0 ──> B1
    stage 1          F0 ──> B0 ──> F1 ──> B1

Between the rows, data: F1 of stage 1 takes the outputs of F1 of stage 0, and B0 of stage 0 the gradients from B0 of
stage 1. TensorFlow sends them from device to device as soon as they are computed. Along a row, turns: each call takes a
scalar from the call before it. Without turns, TensorFlow's executor runs whatever has its inputs: in any order, and
with more micro-batches at a time than 1F1B keeps in memory.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.layer_graph.values import Gradients, Value, pack
from tfdist.memory.offload import from_host, is_data, to_host
from tfdist.memory.order import Keeping, Order
from tfdist.memory.policy import MemoryPolicy
from tfdist.strategies.pipeline.chunk_functions import Forward
from tfdist.strategies.pipeline.clock import Clock
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.schedule import Instruction
from tfdist.strategies.pipeline.weight_gradients import GradientSums


class PipelineRun:
    """Micro-batches on their way through one pipeline: adds the instructions of a schedule to the graph.

    Args:
        plan: the stages.
        inputs: for each micro-batch, the model's inputs in the order of `LayerGraph.inputs`.
        trainable: values of each chunk's trainable variables, on its device.
        state: values of each chunk's other variables, on its device.
        keep_state: `(micro-batch, new, old) -> value` of a variable after a micro-batch, which may be empty.
        training: as in `model(x, training=training)`.
        differentiable: whether a backward pass may follow.
        clock: measures when each instruction begins and ends; `None`: no times are wanted.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        inputs: Sequence[Sequence[tf.Tensor]],
        trainable: Sequence[Sequence[tf.Tensor]],
        state: Sequence[Sequence[tf.Tensor]],
        keep_state: Callable[[int, tf.Tensor, tf.Tensor], tf.Tensor],
        training: bool,
        differentiable: bool,
        clock: Clock | None = None,
    ):
        self.plan, self._training, self._differentiable = plan, training, differentiable
        self._trainable, self._keep_state, self._clock = trainable, keep_state, clock
        # By chunk: what layers change (moving averages, seeds) goes from each micro-batch to the next one as a tensor.
        # The variables are written once, at the end of the step.
        self._initial_state = [list(values) for values in state]
        self._state = [list(values) for values in state]
        # By micro-batch: the values that chunks have computed, and the gradients of values, by the key of the value. A
        # value that several chunks take gets several gradients; its own chunk adds them up.
        self._values: list[dict[int, Value]] = [
            dict(zip(plan.graph.inputs, map(Value, piece), strict=True)) for piece in inputs
        ]
        self._cotangents: list[dict[int, list[Gradients]]] = [{} for _ in inputs]
        self._loss_cotangents: list[tf.Tensor] = []
        # By chunk and micro-batch: what the backward pass needs. By stage: what its next call waits for.
        self._forwards: dict[tuple[int, int], Forward] = {}
        self._turns: dict[int, tf.Tensor] = {}
        self._offload: ActivationOffload | None = None
        if differentiable and any(plan.swap):
            self._offload = ActivationOffload(plan.policy, plan.swap, plan.devices, plan.schedule.orders)
        self.losses: list[list[tf.Tensor]] = [[] for _ in inputs]
        self.sums = GradientSums(plan.chunks, plan.device_of)

    def copy(self) -> PipelineRun:
        """A run with the same forward pass, for another backward pass: it has its own copy of what that changes."""
        other = copy.copy(self)
        other._forwards = dict(self._forwards)
        other._cotangents = [{} for _ in self._cotangents]
        other._turns = dict(self._turns)
        other._offload = self._offload.copy() if self._offload is not None else None
        other.sums = GradientSums(self.plan.chunks, self.plan.device_of)
        return other

    def execute(
        self,
        instructions: Sequence[tuple[int, Instruction]],
        after_model: Callable[[int], list[tf.Tensor]] | None = None,
    ) -> None:
        """Adds instructions to the graph.

        Args:
            instructions: `(stage, instruction)` in an order in which each has what it needs.
            after_model: called with a micro-batch once its last forward pass is in the graph; what it adds runs on that
                stage, which waits for the tensors that it returns.
        """
        for stage, instruction in instructions:
            with self.on_stage(stage, instruction):
                if self._offload is not None:
                    begins_with = [self._turns[stage], *self._inputs_of(instruction)]
                    self._delay_turn(stage, self._offload.begin(stage, instruction, begins_with))
                if instruction.kind == "forward":
                    self._forward(stage, instruction.chunk, instruction.microbatch)
                    if after_model and instruction.chunk == len(self.plan.chunks) - 1:
                        # The loss and its gradient come between the last forward pass and the first backward pass.
                        self._delay_turn(stage, after_model(instruction.microbatch))
                else:
                    self._backward(stage, instruction.chunk, instruction.microbatch)

    @contextlib.contextmanager
    def on_stage(self, stage: int, instruction: Instruction) -> Iterator[None]:
        """Places the operations of the block on a stage's device; with a clock, reads the time before and after them.

        The turns put the two readings before and behind the block's call, and behind what the stage did before.
        """
        with tf.device(self.plan.devices[stage]), tf.name_scope(f"{instruction.kind}_{instruction.chunk}"):
            if stage not in self._turns:
                self._turns[stage] = tf.zeros([])
            if self._clock is None:
                yield
                return
            # An instruction begins when its inputs have arrived: their transfer is no work of this stage. `identity`
            # is on this device, so waiting for it is waiting for the arrival.
            needed = [*self._clock.ends_of(self.plan.schedule.requirements(instruction)), *self._inputs_of(instruction)]
            here = [tf.identity(tensor) for tensor in needed]
            with tf.control_dependencies([self._turns[stage], *here]):
                began = self._clock.begin(stage, instruction)
            self._delay_turn(stage, [began])
            yield
            with tf.control_dependencies([self._turns[stage]]):
                ended = self._clock.end(stage, instruction)
            self._delay_turn(stage, [ended])

    def value(self, index: int, key: int) -> Value:
        """A value that the forward pass of a micro-batch has computed."""
        return self._values[index][key]

    def add_cotangents(self, index: int, keys: Sequence[int], cotangents: Sequence[Gradients]) -> None:
        """Adds gradients of values, for one micro-batch."""
        for key, cotangent in zip(keys, cotangents, strict=True):
            self._cotangents[index].setdefault(key, []).append(cotangent)

    def gradient_of_input(self, index: int, key: int) -> tf.Tensor | None:
        """Gradient of one of the model's inputs, for one micro-batch; `None` if there is none."""
        return _total(self._cotangents[index].get(key, [])).tensor

    def changed_state(self, chunk: int) -> list[tf.Tensor | None]:
        """A chunk's state after the last micro-batch; `None` for each variable that no layer changes."""
        pairs = zip(self._state[chunk], self._initial_state[chunk], strict=True)
        return [now if now is not before else None for now, before in pairs]

    def set_loss_cotangents(self, cotangents: Sequence[tf.Tensor]) -> None:
        """Sets, for each micro-batch, the gradient of the losses that layers have added."""
        self._loss_cotangents = list(cotangents)

    def _delay_turn(self, stage: int, tensors: Sequence[tf.Tensor | tf.Operation]) -> None:
        """Makes the next call of a stage wait for these tensors, by an `identity` of its turn with control inputs."""
        with tf.control_dependencies(tensors):
            self._turns[stage] = tf.identity(self._turns[stage])

    def _forward(self, stage: int, index: int, microbatch: int) -> None:
        chunk, values = self.plan.chunks[index], self._values[microbatch]
        inputs = [values[key] for key in chunk.inputs]
        trace = self.plan.functions(chunk, self._training).trace(inputs, self._differentiable)
        before = self._state[index]
        forward = trace.forward(self._turns[stage], self._trainable[index], before, inputs)
        self._turns[stage] = forward.turn
        values.update(zip(chunk.outputs, forward.outputs, strict=True))
        self._state[index] = [
            new if new is old else self._keep_state(microbatch, new, old)
            for new, old in zip(forward.state, before, strict=True)
        ]
        if forward.loss is not None:
            self.losses[microbatch].append(forward.loss)
        if self._offload is not None:
            kept = self._offload.sent(stage, Instruction("forward", index, microbatch), forward.kept)
            forward = dataclasses.replace(forward, kept=kept)
        if self._differentiable:
            self._forwards[index, microbatch] = forward

    def _backward(self, stage: int, index: int, microbatch: int) -> None:
        chunk, cotangents = self.plan.chunks[index], self._cotangents[microbatch]
        forward = self._forwards.pop((index, microbatch))
        if self._offload is not None:
            forward = dataclasses.replace(forward, kept=self._offload.fetched(stage, forward.kept))
        inputs = [self._values[microbatch][key] for key in chunk.inputs]
        given = [_total(cotangents.pop(key, [])) for key in chunk.outputs]
        trace = self.plan.functions(chunk, self._training).trace(inputs, True)
        loss_cotangent = self._loss_cotangents[microbatch] if forward.loss is not None else None
        backward = trace.backward(self._turns[stage], forward, given, loss_cotangent)
        self._turns[stage] = backward.turn
        self.add_cotangents(microbatch, chunk.inputs, backward.inputs)
        self.sums.add(chunk, backward.weights, trace.products)

    def _inputs_of(self, instruction: Instruction) -> list[tf.Tensor]:
        chunk = self.plan.chunks[instruction.chunk]
        if instruction.kind == "forward":
            return pack([self._values[instruction.microbatch][key] for key in chunk.inputs])[0]
        cotangents = self._cotangents[instruction.microbatch]
        return [t for key in chunk.outputs for pair in cotangents.get(key, []) for t in pair if t is not None]


def _total(gradients: Sequence[Gradients]) -> Gradients:
    """The sum of the gradients of one value, on the current device: that of the chunk that has computed it."""
    parts = [[part for part in of_part if part is not None] for of_part in zip(*gradients, strict=True)]
    return Gradients(*(tf.add_n(found) if len(found) > 1 else next(iter(found), None) for found in parts))


class ActivationOffload:
    """Moves what a micro-batch keeps for its backward pass to the host, and back before it is needed.

    instructions of a stage   F0   F1   F2   F3 ... B0   B1
    to the host                    F0's F1's ...
    back                                        B0's B1's     one instruction before it is needed

    Before an instruction, the stage waits until what the forward pass before the last one has left is on the host.
    Otherwise the stage would run ahead of the copies, and what it leaves would pile up on the device.

    Args:
        policy: which host, how many instructions ahead something is fetched, and which tensors are too small.
        swap: for each chunk, whether what it keeps is moved.
        devices: the device of each stage.
        orders: the instructions of each stage.
    """

    def __init__(
        self,
        policy: MemoryPolicy,
        swap: Sequence[bool],
        devices: Sequence[str],
        orders: Sequence[Sequence[Instruction]],
    ):
        self._swap, self._devices = swap, devices
        self._keepings = [
            Keeping(Order(), _host_of(device, policy.host), policy.prefetch, policy.min_bytes) for device in devices
        ]
        self._places = [{instruction: i for i, instruction in enumerate(order)} for order in orders]
        # By stage, for each instruction so far: the tensors that are there when it begins. A copy back to the device
        # waits for those of an earlier instruction.
        self._begun: list[list[Sequence[tf.Tensor]]] = [[] for _ in devices]
        # Ids of the tensors on the host. They stay unique: the orders of `_keepings` hold the tensors.
        self._copies: set[int] = set()

    def copy(self) -> ActivationOffload:
        """A copy for another backward pass: what was sent to the host is still there."""
        other = copy.copy(self)
        other._begun = [list(begun) for begun in self._begun]
        return other

    def begin(self, stage: int, instruction: Instruction, begins_with: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Begins an instruction; returns the copies to the host that it waits for.

        Args:
            stage: the stage.
            instruction: the instruction.
            begins_with: tensors that are there when it begins: its inputs, and the stage's turn.
        """
        self._begun[stage].append(begins_with)
        order = self._keepings[stage].order
        return order.to_wait_for(order.begin_block()) if instruction.kind == "forward" else []

    def sent(self, stage: int, instruction: Instruction, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Adds copies to the host of what a forward pass has left.

        Args:
            stage: the stage.
            instruction: the forward pass.
            tensors: what it has left.

        Returns:
            The tensors, each on the host if it is large enough and not needed again too soon.
        """
        keeping, places = self._keepings[stage], self._places[stage]
        away = places[instruction._replace(kind="backward")] - places[instruction]
        # Where that is so soon, it would be fetched back before it has been sent.
        if not self._swap[instruction.chunk] or away <= keeping.prefetch + 1:
            return list(tensors)
        place = len(keeping.order.copies) - 1
        kept = [to_host(tensor, place, keeping) if _travels(tensor, keeping) else tensor for tensor in tensors]
        self._copies |= {id(copied) for copied, tensor in zip(kept, tensors, strict=True) if copied is not tensor}
        return kept

    def fetched(self, stage: int, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors that `sent` has returned, on the device, for the backward pass that begins now.

        A copy back begins when the instruction `prefetch` places before this one begins. If it came earlier, the device
        would hold it for longer; if it came with this instruction, that would have to wait for it.
        """
        keeping, begun = self._keepings[stage], self._begun[stage]
        gate = begun[max(0, len(begun) - 1 - keeping.prefetch)]
        device = self._devices[stage]
        return [from_host(t, device, keeping, gate) if id(t) in self._copies else t for t in tensors]


def _travels(tensor: tf.Tensor, keeping: Keeping) -> bool:
    return is_data(tensor) and keeping.moves(tensor)


def _host_of(device: str, host: str) -> str:
    """The host of a stage: a device in the process of the stage."""
    spec: Any = tf.DeviceSpec.from_string(device)
    return spec.make_merged_spec(tf.DeviceSpec.from_string(host)).to_string()
