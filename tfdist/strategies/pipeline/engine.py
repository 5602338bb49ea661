"""Runs a plan's chunks on micro-batches, in the order of a schedule, as operations of one TensorFlow graph."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.pipeline.chunk import Value
from tfdist.strategies.pipeline.chunk_functions import Backward, Forward
from tfdist.strategies.pipeline.clock import Clock
from tfdist.strategies.pipeline.gradient_sums import GradientSums
from tfdist.strategies.pipeline.micro_batches import MicroBatches
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.schedule import Instruction


class PipelineRun:
    """One batch on its way through the pipeline: what each instruction of the schedule adds to the graph.

    Nothing but control dependencies makes TensorFlow's executor follow a schedule: without them it runs whatever has
    its inputs, which is more micro-batches at a time than 1F1B keeps in memory.

    Args:
        plan: the stages.
        micro_batches: how the batch is cut.
        inputs: the model's inputs, in the order of `LayerGraph.inputs`.
        trainable: values of each chunk's trainable variables, on its device.
        training: as in `model(x, training=training)`.
        differentiable: whether a backward pass may follow.
        clock: notes when each instruction begins and ends; `None`: nobody wants to know.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        micro_batches: MicroBatches,
        inputs: Sequence[tf.Tensor],
        trainable: Sequence[Sequence[tf.Tensor]],
        training: bool,
        differentiable: bool,
        clock: Clock | None = None,
    ):
        self.plan, self.micro_batches, self.training, self.differentiable = (
            plan,
            micro_batches,
            training,
            differentiable,
        )
        self._clock = clock
        self._trainable = trainable
        self._state = [_read(chunk.state, plan.device_of(chunk.index)) for chunk in plan.chunks]
        cut = micro_batches.cut(list(inputs))
        self._values: list[dict[int, Value]] = [
            dict(zip(plan.graph.inputs, map(Value, piece), strict=True)) for piece in cut
        ]
        self._cotangents: list[dict[int, list[tf.Tensor]]] = [{} for _ in cut]
        self._forwards: dict[tuple[int, int], Forward] = {}
        self._last: list[list[tf.Operation]] = [[] for _ in plan.devices]
        self.losses: list[list[tf.Tensor]] = [[] for _ in cut]
        self.sums = GradientSums(plan)

    def copy(self) -> PipelineRun:
        """The same forward pass, for another backward pass."""
        other = copy.copy(self)
        other._forwards = dict(self._forwards)
        other._cotangents = [{} for _ in self._cotangents]
        other._last = [list(last) for last in self._last]
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
                if instruction.kind == "forward":
                    done = self._forward(instruction.chunk, instruction.microbatch)
                    if after_model and instruction.chunk == len(self.plan.chunks) - 1:
                        done += after_model(instruction.microbatch)
                else:
                    done = self._backward(instruction.chunk, instruction.microbatch)
                self._last[stage] = [t.op for t in done]

    @contextlib.contextmanager
    def on_stage(self, stage: int, instruction: Instruction) -> Iterator[None]:
        """Operations of the block run on a stage's device, after all that was given to it before."""
        with tf.device(self.plan.devices[stage]), tf.name_scope(f"{instruction.kind}_{instruction.chunk}"):
            if self._clock is None:
                with tf.control_dependencies(self._last[stage]):
                    yield
                return
            needed = [*self._last[stage], *(t.op for t in self._inputs_of(instruction))]
            with tf.control_dependencies(needed):
                began = self._clock.begin(stage, instruction)
            with tf.control_dependencies([began.op]):
                yield
            with tf.control_dependencies(self._last[stage]):
                ended = self._clock.end(stage, instruction)
            self._last[stage] = [ended.op]

    def output(self, key: int) -> Value:
        """One of the model's outputs, of the whole batch."""
        pieces = [values[key] for values in self._values]
        with tf.device(self._device_of_value(key)):
            tensor = self.micro_batches.join([piece.tensor for piece in pieces])
            mask = None if pieces[0].mask is None else self.micro_batches.join([piece.mask for piece in pieces])
        return Value(tensor, mask)

    def outputs_of(self, index: int) -> list[Value]:
        """The model's outputs for one micro-batch."""
        return [self._values[index][key] for key in self.plan.graph.outputs]

    def add_cotangents(self, index: int, keys: Sequence[int], cotangents: Sequence[tf.Tensor | None]) -> None:
        """Notes gradients of values, for one micro-batch."""
        for key, cotangent in zip(keys, cotangents, strict=True):
            if cotangent is not None:
                self._cotangents[index].setdefault(key, []).append(cotangent)

    def gradient_of_input(self, key: int) -> tf.Tensor | None:
        """Gradient of one of the model's inputs; `None` if there is none."""
        if not all(key in cotangents for cotangents in self._cotangents):
            return None
        pieces = [tf.add_n(cotangents[key]) for cotangents in self._cotangents]
        return self.micro_batches.join(pieces)

    def assign_state(self) -> None:
        """Writes what the last micro-batch has left of the layers' state to the variables."""
        for chunk, values in zip(self.plan.chunks, self._state, strict=True):
            with tf.device(self.plan.device_of(chunk.index)):
                for variable, (before, now) in zip(chunk.state, values, strict=True):
                    if now is not before:
                        variable._value.assign(now)

    def set_loss_cotangents(self, cotangents: Sequence[tf.Tensor]) -> None:
        """Sets, for each micro-batch, the gradient of the losses that layers have added."""
        self._loss_cotangents = list(cotangents)

    def _forward(self, index: int, microbatch: int) -> list[tf.Tensor]:
        chunk, values = self.plan.chunks[index], self._values[microbatch]
        inputs = [values[key] for key in chunk.inputs]
        trace = self.plan.functions(chunk, self.training).trace(inputs, self.differentiable)
        before = [now for _, now in self._state[index]]
        forward = trace.forward(self._trainable[index], before, inputs)
        values.update(zip(chunk.outputs, forward.outputs, strict=True))
        kept = [
            new if new is old else self.micro_batches.kept(microbatch, new, old)
            for new, old in zip(forward.state, before, strict=True)
        ]
        self._state[index] = [(first, new) for (first, _), new in zip(self._state[index], kept, strict=True)]
        if forward.loss is not None:
            self.losses[microbatch].append(forward.loss)
        if self.differentiable:
            self._forwards[index, microbatch] = forward
        return forward.tensors[:1]

    def _backward(self, index: int, microbatch: int) -> list[tf.Tensor]:
        chunk, cotangents = self.plan.chunks[index], self._cotangents[microbatch]
        forward = self._forwards.pop((index, microbatch))
        inputs = [self._values[microbatch][key] for key in chunk.inputs]
        given = [cotangents.pop(key, None) for key in chunk.outputs]
        given = [g if g is None else g[0] if len(g) == 1 else tf.add_n(g) for g in given]
        trace = self.plan.functions(chunk, self.training).trace(inputs, True)
        loss_cotangent = self._loss_cotangents[microbatch] if forward.loss is not None else None
        backward: Backward = trace.backward(forward, given, loss_cotangent)
        self.add_cotangents(microbatch, chunk.inputs, backward.inputs)
        self.sums.add(chunk, backward.weights, trace.products)
        return backward.tensors[:1]

    def _inputs_of(self, instruction: Instruction) -> list[tf.Tensor]:
        chunk = self.plan.chunks[instruction.chunk]
        if instruction.kind == "forward":
            return [self._values[instruction.microbatch][key].tensor for key in chunk.inputs]
        cotangents = self._cotangents[instruction.microbatch]
        return [t for key in chunk.outputs for t in cotangents.get(key, [])]

    def _device_of_value(self, key: int) -> str:
        owners = [chunk.index for chunk in self.plan.chunks if key in chunk.outputs]
        return self.plan.device_of(owners[0] if owners else 0)


def read_trainable(plan: PipelinePlan) -> list[list[tf.Tensor]]:
    """The values of the trainable variables of each chunk, on its device, read once for all micro-batches."""
    return [[value for _, value in _read(chunk.trainable, plan.device_of(chunk.index))] for chunk in plan.chunks]


def _read(variables: Sequence[Any], device: str) -> list[tuple[tf.Tensor, tf.Tensor]]:
    with tf.device(device):
        values = [tf.identity(v._value) for v in variables]
    return [(value, value) for value in values]
