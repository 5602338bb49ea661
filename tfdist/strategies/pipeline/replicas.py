"""Pipelines side by side: each has its share of a batch's micro-batches, and all train the same variables.

The variables live on the first pipeline. In every step their values go to the other pipelines' stages once, and the
sums of these stages' gradients come back once: as many bytes as an all-reduce moves, and no two copies of a weight that
could ever differ. The optimizer's slots exist once, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.layer_graph.values import Gradients, Value
from tfdist.strategies.model_parts import seed_generators_of
from tfdist.strategies.pipeline.clock import Clock
from tfdist.strategies.pipeline.engine import PipelineRun
from tfdist.strategies.pipeline.gradient_sums import added
from tfdist.strategies.pipeline.micro_batches import MicroBatches
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.schedule import Instruction

# Far apart, so that no two pipelines draw the same masks for Dropout (2**31 divided by the golden ratio).
_SEED_STRIDE = 0x4F1BBCDD


class ReplicatedRun:
    """One batch on its way through all pipelines.

    Args:
        plan: the stages.
        micro_batches: how the batch is cut: equally many micro-batches for each pipeline, in their order.
        inputs: the model's inputs, in the order of `LayerGraph.inputs`.
        trainable: what `read_trainable` returns.
        training: as in `model(x, training=training)`.
        differentiable: whether a backward pass may follow.
        clock: notes when each instruction of the first pipeline begins and ends.
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
        self._plan, self._micro_batches = plan, micro_batches
        self._each = micro_batches.count // plan.replicas
        cut = micro_batches.cut(list(inputs))
        state = [_read([v._value for v in chunk.state], plan.device_of(chunk.index)) for chunk in plan.chunks]
        seeds = {id(generator.state) for generator in seed_generators_of(plan.model)}
        self._runs = []
        for replica, own in enumerate(plan.pipelines):
            own_trainable, own_state = trainable, state
            if replica > 0:
                own_trainable = [_read(v, own.device_of(i)) for i, v in enumerate(trainable)]
                own_state = [_read(v, own.device_of(i)) for i, v in enumerate(state)]
                own_state = [
                    [_reseeded(v, replica) if id(k) in seeds else v for k, v in zip(chunk.state, values, strict=True)]
                    for chunk, values in zip(plan.chunks, own_state, strict=True)
                ]
            first = replica * self._each
            self._runs.append(
                PipelineRun(
                    own,
                    cut[first : first + self._each],
                    own_trainable,
                    own_state,
                    _keep_from(micro_batches, first),
                    training,
                    differentiable,
                    clock if replica == 0 else None,
                )
            )

    def copy(self) -> ReplicatedRun:
        """The same forward pass, for another backward pass."""
        other = copy.copy(self)
        other._runs = [run.copy() for run in self._runs]
        return other

    @property
    def losses(self) -> list[list[tf.Tensor]]:
        """Losses that layers have added, for each micro-batch."""
        return [losses for run in self._runs for losses in run.losses]

    def execute(
        self,
        instructions: Sequence[tuple[int, Instruction]],
        after_model: Callable[[int], list[tf.Tensor]] | None = None,
    ) -> None:
        """Adds instructions to the graph, for every pipeline; see `PipelineRun.execute`."""
        for replica, run in enumerate(self._runs):
            first = replica * self._each
            run.execute(instructions, after_model and (lambda index, first=first: after_model(first + index)))

    def outputs_of(self, index: int) -> list[Value]:
        """The model's outputs for one micro-batch."""
        run, own = self._find(index)
        return [run.value(own, key) for key in self._plan.graph.outputs]

    def output(self, key: int) -> Value:
        """One of the model's outputs, of the whole batch."""
        pieces = [run.value(i, key) for run in self._runs for i in range(self._each)]
        with tf.device(self._plan.device_of_value(key)):
            parts = [None if part[0] is None else self._micro_batches.join(part) for part in zip(*pieces, strict=True)]
        return Value(*parts)

    def add_cotangents(self, index: int, keys: Sequence[int], cotangents: Sequence[Gradients]) -> None:
        """Notes gradients of values, for one micro-batch."""
        run, own = self._find(index)
        run.add_cotangents(own, keys, cotangents)

    def set_loss_cotangents(self, cotangents: Sequence[tf.Tensor]) -> None:
        """Sets, for each micro-batch, the gradient of the losses that layers have added."""
        for replica, run in enumerate(self._runs):
            run.set_loss_cotangents(cotangents[replica * self._each : (replica + 1) * self._each])

    def gradient_of_input(self, key: int) -> tf.Tensor | None:
        """Gradient of one of the model's inputs; `None` if there is none."""
        pieces = [run.gradient_of_input(i, key) for run in self._runs for i in range(self._each)]
        return None if any(piece is None for piece in pieces) else self._micro_batches.join(pieces)

    def gradients_of_chunks(self) -> list[Any]:
        """The gradients of the first chunk's variables, then of the second one's, and so on; `None` where none is."""
        total, *others = (run.sums.of_chunks() for run in self._runs)
        devices = [self._plan.device_of(chunk.index) for chunk in self._plan.chunks for _ in chunk.trainable]
        for other in others:
            for i, (device, gradient) in enumerate(zip(devices, other, strict=True)):
                if gradient is None:
                    continue
                with tf.device(device):
                    total[i] = gradient if total[i] is None else added(total[i], gradient)
        return total

    def gradients_of_variables(self) -> dict[int, Any]:
        """The gradients by the variables' ids, on their devices; variables without one are missing."""
        variables = [variable for chunk in self._plan.chunks for variable in chunk.trainable]
        total: dict[int, Any] = {}
        for variable, gradient in zip(variables, self.gradients_of_chunks(), strict=True):
            if gradient is None:
                continue
            # Several chunks may use a variable.
            with tf.device(self._plan.device_of(self._plan.homes[id(variable)])):
                known = total.get(id(variable))
                total[id(variable)] = gradient if known is None else added(known, gradient)
        return total

    def assign_state(self) -> None:
        """Writes the layers' state after the last micro-batches to the variables: statistics are averaged."""
        rows = [sum(self._micro_batches.weight(r * self._each + i) for i in range(self._each)) for r in self._replicas]
        for chunk in self._plan.chunks:
            with tf.device(self._plan.device_of(chunk.index)):
                found = [run.changed_state(chunk.index) for run in self._runs]
                for variable, values in zip(chunk.state, zip(*found, strict=True), strict=True):
                    if values[0] is None:
                        continue
                    if len(values) == 1 or not values[0].dtype.is_floating:
                        variable._value.assign(values[0])
                    else:
                        parts = [v * tf.cast(w, v.dtype) for v, w in zip(values, rows, strict=True)]
                        variable._value.assign(tf.add_n(parts))

    @property
    def _replicas(self) -> range:
        return range(len(self._runs))

    def _find(self, index: int) -> tuple[PipelineRun, int]:
        return self._runs[index // self._each], index % self._each


def read_trainable(plan: PipelinePlan) -> list[list[tf.Tensor]]:
    """The values of the trainable variables of each chunk, on its device, read once for all micro-batches."""
    return [_read([v._value for v in chunk.trainable], plan.device_of(chunk.index)) for chunk in plan.chunks]


def _read(values: Sequence[Any], device: str) -> list[tf.Tensor]:
    with tf.device(device):
        return [tf.identity(value) for value in values]


def _reseeded(state: tf.Tensor, replica: int) -> tf.Tensor:
    return state + tf.constant([replica * _SEED_STRIDE % 2**31, 0], state.dtype)


def _keep_from(micro_batches: MicroBatches, first: int) -> Callable:
    return lambda index, new, old: micro_batches.kept(first + index, new, old)
