"""Runs the chunks of one pipeline on its micro-batches, as operations of one TensorFlow graph."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from tfdist.layer_graph.values import Gradients, Value, pack
from tfdist.strategies.pipeline.chunk_functions import Forward
from tfdist.strategies.pipeline.clock import Clock
from tfdist.strategies.pipeline.gradient_sums import GradientSums
from tfdist.strategies.pipeline.host_stays import HostStays
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.schedule import Instruction


class PipelineRun:
    """Micro-batches on their way through the pipeline: what each instruction of a schedule adds to the graph.

    Nothing but dependencies makes TensorFlow's executor follow a schedule: without them it runs whatever has its
    inputs, which is more micro-batches at a time than 1F1B keeps in memory. So each call of a function has its turn.

    Args:
        plan: the stages.
        inputs: for each micro-batch, the model's inputs in the order of `LayerGraph.inputs`.
        trainable: values of each chunk's trainable variables, on its device.
        state: values of each chunk's other variables, on its device.
        keep_state: `(micro-batch, new, old) -> value` of a variable after a micro-batch, which may be empty.
        training: as in `model(x, training=training)`.
        differentiable: whether a backward pass may follow.
        clock: notes when each instruction begins and ends; `None`: nobody wants to know.
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
        self._initial_state = [list(values) for values in state]
        self._state = [list(values) for values in state]
        self._values: list[dict[int, Value]] = [
            dict(zip(plan.graph.inputs, map(Value, piece), strict=True)) for piece in inputs
        ]
        self._cotangents: list[dict[int, list[Gradients]]] = [{} for _ in inputs]
        self._loss_cotangents: list[tf.Tensor] = []
        self._forwards: dict[tuple[int, int], Forward] = {}
        self._turns: dict[int, tf.Tensor] = {}
        self._stays: HostStays | None = None
        if differentiable and plan.stays is not None:
            self._stays = HostStays(plan.stays, plan.devices, plan.schedule.orders)
        self.losses: list[list[tf.Tensor]] = [[] for _ in inputs]
        self.sums = GradientSums(plan)

    def copy(self) -> PipelineRun:
        """The same forward pass, for another backward pass."""
        other = copy.copy(self)
        other._forwards = dict(self._forwards)
        other._cotangents = [{} for _ in self._cotangents]
        other._turns = dict(self._turns)
        other._stays = self._stays.copy() if self._stays is not None else None
        other.sums = GradientSums(self.plan)
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
                if self._stays is not None:
                    begins_with = [self._turns[stage], *self._inputs_of(instruction)]
                    self._delay_turn(stage, self._stays.begin(stage, instruction, begins_with))
                if instruction.kind == "forward":
                    self._forward(stage, instruction.chunk, instruction.microbatch)
                    if after_model and instruction.chunk == len(self.plan.chunks) - 1:
                        self._delay_turn(stage, after_model(instruction.microbatch))
                else:
                    self._backward(stage, instruction.chunk, instruction.microbatch)

    @contextlib.contextmanager
    def on_stage(self, stage: int, instruction: Instruction) -> Iterator[None]:
        """Operations of the block are on a stage's device, and its functions run after all that were given to it."""
        with tf.device(self.plan.devices[stage]), tf.name_scope(f"{instruction.kind}_{instruction.chunk}"):
            if stage not in self._turns:
                self._turns[stage] = tf.zeros([])
            if self._clock is None:
                yield
                return
            # It begins when its inputs are here: their way from another device is no work of this one.
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
        """A value that the forward pass of a micro-batch has made."""
        return self._values[index][key]

    def add_cotangents(self, index: int, keys: Sequence[int], cotangents: Sequence[Gradients]) -> None:
        """Notes gradients of values, for one micro-batch."""
        for key, cotangent in zip(keys, cotangents, strict=True):
            self._cotangents[index].setdefault(key, []).append(cotangent)

    def gradient_of_input(self, index: int, key: int) -> tf.Tensor | None:
        """Gradient of one of the model's inputs, for one micro-batch; `None` if there is none."""
        return _total(self._cotangents[index].get(key, [])).tensor

    def changed_state(self, chunk: int) -> list[tf.Tensor | None]:
        """What the last micro-batch has left of a chunk's state; `None` for what no layer changes."""
        pairs = zip(self._state[chunk], self._initial_state[chunk], strict=True)
        return [now if now is not before else None for now, before in pairs]

    def set_loss_cotangents(self, cotangents: Sequence[tf.Tensor]) -> None:
        """Sets, for each micro-batch, the gradient of the losses that layers have added."""
        self._loss_cotangents = list(cotangents)

    def _delay_turn(self, stage: int, tensors: Sequence[tf.Tensor]) -> None:
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
        if self._stays is not None:
            kept = self._stays.sent(stage, Instruction("forward", index, microbatch), forward.kept)
            forward = dataclasses.replace(forward, kept=kept)
        if self._differentiable:
            self._forwards[index, microbatch] = forward

    def _backward(self, stage: int, index: int, microbatch: int) -> None:
        chunk, cotangents = self.plan.chunks[index], self._cotangents[microbatch]
        forward = self._forwards.pop((index, microbatch))
        if self._stays is not None:
            forward = dataclasses.replace(forward, kept=self._stays.fetched(stage, forward.kept))
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
    """The sum of the gradients of one value."""
    parts = [[part for part in of_part if part is not None] for of_part in zip(*gradients, strict=True)]
    return Gradients(*(tf.add_n(found) if len(found) > 1 else next(iter(found), None) for found in parts))
