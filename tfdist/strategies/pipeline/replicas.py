"""One batch on its way: cut into micro-batches, and dealt out to one or several pipelines.

    rows of a batch of 10 in 4 micro-batches:   0 1 2 | 3 4 5 | 6 7 | 8 9        weights 0.3 0.3 0.2 0.2
    rows of a last batch of 3:                  0 | 1 | 2 | (none: row 0 stands in, with weight 0)

Each pipeline has its share of the micro-batches, and all train the same variables, which are on the first pipeline:

    pipeline 0 (with the variables)   micro-batches 0, 1   gradients ──> sum ──> update of the variables
         │ values, once a step                                            ^
         v                                                                │ sums of gradients, once a step
    pipeline 1                        micro-batches 2, 3   gradients ─────┘

These are as many bytes as an all-reduce moves, and there are no two copies of a weight that could ever differ. The
optimizer's slots exist once, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.inspection.batch_sharding import count_rows, share, static_rows, take_share
from tfdist.inspection.model_parts import seed_generators_of
from tfdist.layer_graph.values import Gradients, Value
from tfdist.strategies.pipeline.clock import Clock
from tfdist.strategies.pipeline.engine import PipelineRun
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.schedule import Instruction
from tfdist.strategies.pipeline.weight_gradients import added

# Distance between the seeds of pipelines (2**31 divided by the golden ratio): no two draw the same Dropout masks.
_SEED_STRIDE = 0x4F1BBCDD


class MicroBatches:
    """Cuts the batches of one traced step into a fixed number of micro-batches.

    Args:
        data: the batch, any structure of tensors.
        count: number of micro-batches.
        may_be_fewer: whether there may be fewer rows than that.

    Raises:
        ValueError: if the batch certainly has fewer rows, and may not.
    """

    def __init__(self, data: Any, count: int, may_be_fewer: bool = False):
        self.count = count
        self._static_rows = static_rows(data)
        if self._static_rows is not None and self._static_rows < count and not may_be_fewer:
            raise ValueError(
                f"Received: a batch of {self._static_rows} rows, for {count} micro-batches. Expected: at least one row "
                "a micro-batch. Use a larger batch size, or PipelineStrategy(num_microbatches=...) with a smaller "
                "number."
            )
        self.rows = self._static_rows if self._static_rows is not None else count_rows(data)

    @property
    def may_be_empty(self) -> bool:
        """Whether there may be batches with fewer rows than micro-batches (a last, partial one)."""
        return self._static_rows is None or self._static_rows < self.count

    def size(self, index: int) -> Any:
        """Number of rows of a micro-batch: an int where the batch size is static, else an int32 scalar."""
        return share(self.rows, self.count, index)[1]

    def weight(self, index: int) -> tf.Tensor:
        """The share of a micro-batch in the rows of the batch, a float32 scalar."""
        return tf.cast(self.size(index) / self.rows, tf.float32)

    def cut(self, data: Any) -> list[Any]:
        """The micro-batches of any structure of tensors with as many rows as the batch."""
        return [take_share(data, self.count, i)[0] for i in range(self.count)]

    def cut_gradient(self, gradient: tf.Tensor) -> list[tf.Tensor]:
        """Like `cut`, but with zeros for rows that stand in."""
        pieces = self.cut(gradient)
        if not self.may_be_empty:
            return pieces
        return [tf.where(self.size(i) > 0, piece, tf.zeros_like(piece)) for i, piece in enumerate(pieces)]

    def join(self, pieces: list[tf.Tensor]) -> tf.Tensor:
        """The rows of all micro-batches, without those that stand in."""
        joined = tf.concat(pieces, 0)
        return joined[: self.rows] if self.may_be_empty else joined

    def kept(self, index: int, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
        """`new`, or `old` if the micro-batch has no rows."""
        return tf.where(self.size(index) > 0, new, old) if self.may_be_empty else new


class ReplicatedRun:
    """One batch on its way through all pipelines.

    Args:
        plan: the stages.
        micro_batches: how the batch is cut: equally many micro-batches for each pipeline, in their order.
        inputs: the model's inputs, in the order of `LayerGraph.inputs`.
        trainable: what `read_trainable` returns.
        training: as in `model(x, training=training)`.
        differentiable: whether a backward pass may follow.
        clock: measures when each instruction of the first pipeline begins and ends.
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
        # The number of micro-batches of each pipeline.
        self._each = micro_batches.count // plan.replicas
        cut = micro_batches.cut(list(inputs))
        state = [_read([v._value for v in chunk.state], plan.device_of(chunk.index)) for chunk in plan.chunks]
        seeds = {id(generator.state) for generator in seed_generators_of(plan.model)}
        self._runs = []
        for replica, own in enumerate(plan.pipelines):
            own_trainable, own_state = trainable, state
            if replica > 0:
                # Copies on this pipeline's devices: one transfer for each variable, for all micro-batches.
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
        """Adds instructions to the graph, for every pipeline; see `PipelineRun.execute`.

        Nothing connects the pipelines here: TensorFlow runs them side by side.
        """
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
        """Adds gradients of values, for one micro-batch."""
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
                # On the first pipeline: the sum of a pipeline travels, not the gradient of each micro-batch.
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
        """Writes the layers' state after the last micro-batches to the variables.

        Of several pipelines, statistics are averaged, weighted by rows; of whole numbers (seeds) the first one's count.
        """
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
