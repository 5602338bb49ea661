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

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfdist.inspection.model_state import seed_generators_of
from tfdist.layer_graph.chunk import Gradients, Value, pack
from tfdist.memory.kinds import from_host, is_data, to_host
from tfdist.memory.order import Keeping, Order
from tfdist.memory.policy import MemoryPolicy
from tfdist.strategies.data_parallel.dataset import (
    count_rows,
    cut_piece_or_stand_in,
    piece_bounds,
    rows_if,
    static_rows,
    warn_of_other_rows,
)
from tfdist.strategies.pipeline.chunk import Forward, GradientSums, WeightGradients, added
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.schedule import Instruction
from tfdist.strategies.validation import warn_of_updates

# Distance between the seeds of pipelines (2**31 divided by the golden ratio): no two draw the same Dropout masks.
_SEED_STRIDE = 0x4F1BBCDD


class MicroBatches:
    """Cuts the batches of one traced step into a fixed number of micro-batches.

    Args:
        data: the batch, any structure of tensors.
        count: number of micro-batches.
    """

    def __init__(self, data: Any, count: int):
        self.count = count
        self._static_rows = static_rows(data)
        if self._static_rows is not None:
            warn_of_other_rows(data, count)
        self.rows = self._static_rows if self._static_rows is not None else count_rows(data)

    @property
    def may_be_empty(self) -> bool:
        """Whether there may be batches with fewer rows than micro-batches (a last, partial one)."""
        return self._static_rows is None or self._static_rows < self.count

    def size(self, index: int) -> Any:
        """Number of rows of a micro-batch: an int where the batch size is static, else an int32 scalar."""
        return piece_bounds(self.rows, self.count, index)[1]

    def weight(self, index: int) -> tf.Tensor:
        """The share of a micro-batch in the rows of the batch, a float64 scalar."""
        return tf.cast(self.size(index) / self.rows, tf.float64)

    def cut(self, data: Any) -> list[Any]:
        """The micro-batches of any structure of tensors with as many rows as the batch, or a multiple of them."""
        return [cut_piece_or_stand_in(data, self.count, i, of=self.rows)[0] for i in range(self.count)]

    def cut_gradient(self, gradient: tf.Tensor) -> list[tf.Tensor]:
        """Like `cut`, but with zeros for rows that stand in."""
        pieces = self.cut(gradient)
        if not self.may_be_empty:
            return pieces
        return [tf.where(self.size(i) > 0, piece, tf.zeros_like(piece)) for i, piece in enumerate(pieces)]

    def join(self, pieces: list[tf.Tensor]) -> tf.Tensor:
        """The rows of all micro-batches, without those that stand in."""
        if self.may_be_empty:
            # A model may make several rows of one, so that those of stand-ins are not all beyond the batch's rows.
            pieces = [rows_if(self.size(i) > 0, piece) for i, piece in enumerate(pieces)]
        return tf.concat(pieces, 0)

    def kept(self, index: int, new: tf.Tensor, old: tf.Tensor, of_batch: bool) -> tf.Tensor:
        """`new`, or `old` if the micro-batch has no rows; in between, by its rows, if `new` counts a batch as one."""
        if of_batch:
            new = old + tf.cast(self.weight(index), old.dtype) * (new - old)
        return tf.where(self.size(index) > 0, new, old) if self.may_be_empty else new


class PipelineRun:
    """One batch on its way through all pipelines: adds the instructions of a schedule to the graph.

    Args:
        plan: the stages.
        micro_batches: how the batch is cut: equally many micro-batches for each pipeline, in their order.
        inputs: the model's inputs, in the order of `LayerGraph.inputs`.
        trainable: what `read_trainable` returns.
        training: as in `model(x, training=training)`.
        differentiable: whether a backward pass may follow.

    Attributes:
        losses: for each micro-batch, the losses that its layers have added.
        loss_cotangents: for each micro-batch, the gradient of these losses.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        micro_batches: MicroBatches,
        inputs: Sequence[tf.Tensor],
        trainable: Sequence[Sequence[tf.Tensor]],
        training: bool | None,
        differentiable: bool,
    ):
        self._plan, self._micro_batches = plan, micro_batches
        self._training, self._differentiable = training, differentiable
        # By chunk: what its layers have from those before, as in Keras, where `training` is `None`.
        self._inherited = {0: training}
        # The number of micro-batches of each pipeline.
        self._each = micro_batches.count // plan.replicas
        # By micro-batch: the values that chunks have computed, and the gradients of values, by the key of the value. A
        # value that several chunks take gets several gradients; its own chunk adds them up.
        self._values: list[dict[int, Value]] = [
            dict(zip(plan.graph.inputs, map(Value, piece), strict=True)) for piece in micro_batches.cut(list(inputs))
        ]
        self._cotangents: list[dict[int, list[Gradients]]] = [{} for _ in self._values]
        self.losses: list[list[tf.Tensor]] = [[] for _ in self._values]
        self.loss_cotangents: Sequence[tf.Tensor] = []
        # By chunk and micro-batch: what the backward pass needs.
        self._forwards: dict[tuple[int, int], Forward] = {}
        # By pipeline and chunk: the values of its variables. What layers change (moving averages, seeds) goes from each
        # micro-batch to the next one as a tensor. The variables are written once, at the end of the step.
        self._trainable, self._initial_state = self._on_all_pipelines(trainable)
        self._state = [[list(values) for values in state] for state in self._initial_state]
        self._begin_backward()
        stages = [(r, s) for r in range(plan.replicas) for s in range(len(plan.devices))]
        # By pipeline and stage: what has been sent to the host.
        self._offloads: dict[tuple[int, int], ActivationOffload] = {}
        if differentiable and any(plan.swap):
            self._offloads = {
                (r, s): ActivationOffload(plan.policy, plan.pipelines[r][s], plan.schedule.orders[s]) for r, s in stages
            }
        # By pipeline and stage: what its next call waits for.
        self._turns: dict[tuple[int, int], tf.Tensor] = {}

    def _on_all_pipelines(self, trainable: Sequence[Sequence[tf.Tensor]]) -> tuple[list, list]:
        plan = self._plan
        state = [_read([v._value for v in chunk.state], plan.device_of(chunk.index)) for chunk in plan.chunks]
        all_trainable, all_states = [trainable], [state]
        seeds = {id(generator.state) for generator in seed_generators_of(plan.model)}
        for r in range(1, plan.replicas):
            # Copies on this pipeline's devices: one transfer for each variable, for all micro-batches.
            all_trainable.append([_read(v, plan.device_of(i, r)) for i, v in enumerate(trainable)])
            own_state = [_read(v, plan.device_of(i, r)) for i, v in enumerate(state)]
            all_states.append(
                [
                    [_reseeded(v, r) if id(k) in seeds else v for k, v in zip(chunk.state, values, strict=True)]
                    for chunk, values in zip(plan.chunks, own_state, strict=True)
                ]
            )
        return all_trainable, all_states

    def _begin_backward(self) -> None:
        plan = self._plan
        self._sums = [
            GradientSums(plan.chunks, functools.partial(plan.device_of, replica=r)) for r in range(plan.replicas)
        ]
        # By chunk and micro-batch: what backward passes have left of the gradients of weights.
        self._weight_gradients: dict[tuple[int, int], WeightGradients] = {}

    def copy(self) -> PipelineRun:
        """The same forward pass, for another backward pass: with its own copy of what that changes."""
        other = copy.copy(self)
        other._forwards, other._turns = dict(self._forwards), dict(self._turns)
        other._cotangents = [{} for _ in self._cotangents]
        other._offloads = {stage: offload.copy() for stage, offload in self._offloads.items()}
        other._begin_backward()
        return other

    def execute(
        self,
        instructions: Sequence[tuple[int, Instruction]],
        after_model: Callable[[int], list[tf.Tensor]] | None = None,
    ) -> None:
        """Adds instructions to the graph, for every pipeline. Nothing connects these: TensorFlow runs them in parallel.

        Args:
            instructions: `(stage, instruction)` in an order in which each has what it needs.
            after_model: called with a micro-batch once its last forward pass is in the graph; what it adds runs on that
                stage, which waits for the tensors that it returns.
        """
        for replica, devices in enumerate(self._plan.pipelines):
            for number, instruction in instructions:
                stage, (kind, chunk, microbatch) = (replica, number), instruction
                index = replica * self._each + microbatch
                with tf.device(devices[number]), tf.name_scope(f"{kind}_{chunk}"):
                    if stage not in self._turns:
                        self._turns[stage] = tf.zeros([])
                    if self._offloads:
                        begins_with = [self._turns[stage], *self._inputs_of(kind, chunk, index)]
                        self._delay_turn(stage, self._offloads[stage].begin(instruction, begins_with))
                    if kind == "forward":
                        self._forward(stage, instruction, index)
                        if after_model and chunk == len(self._plan.chunks) - 1:
                            # The loss and its gradient come between the last forward and the first backward pass.
                            self._delay_turn(stage, after_model(index))
                    elif kind == "backward":
                        self._backward(stage, chunk, index)
                        if not self._plan.schedule.splits_backward:
                            self._weights(stage, chunk, index)
                    else:
                        self._weights(stage, chunk, index)

    def _delay_turn(self, stage: tuple[int, int], tensors: Sequence[tf.Tensor | tf.Operation]) -> None:
        """Makes the next call of a stage wait for these tensors, by an `identity` of its turn with control inputs."""
        with tf.control_dependencies(tensors):
            self._turns[stage] = tf.identity(self._turns[stage])

    # One instruction, with the tensors that it takes and leaves:
    #
    #   values[inputs of the chunk] ─┐                  ┌─> values[outputs of the chunk]
    #   state after the last one ────┼─> forward call ──┼─> state for the next micro-batch
    #   turn of the stage ───────────┘         │        └─> turn of the stage
    #                                          └─ kept (on the device, or through the host) ──┐
    #   cotangents[outputs of the chunk] ─┐                   ┌─> cotangents[inputs]          │
    #   turn of the stage ────────────────┼─> backward call ──┼─> sums of weight gradients *  │
    #                                     └──────┬────────────┴─> turn of the stage           │
    #                                            └────────────────────────────────────────────┘
    #
    #   * or what a later weights call, which has its own turn, computes them of
    def _forward(self, stage: tuple[int, int], instruction: Instruction, index: int) -> None:
        (replica, _), number, values = stage, instruction.chunk, self._values[index]
        chunk, before = self._plan.chunks[number], self._state[replica][number]
        inputs = [values[key] for key in chunk.inputs]
        passes = self._plan.passes(chunk, self._training, self._inherited[number], inputs, self._differentiable)
        self._inherited[number + 1] = passes.handed_on
        forward = passes.forward(self._turns[stage], self._trainable[replica][number], before, inputs)
        self._turns[stage] = forward.turn
        values.update(zip(chunk.outputs, forward.outputs, strict=True))
        self._state[replica][number] = [
            new if new is old else self._micro_batches.kept(index, new, old, of_batch)
            for new, old, of_batch in zip(forward.state, before, passes.of_batch, strict=True)
        ]
        if forward.loss is not None:
            self.losses[index].append(forward.loss)
        if self._offloads and self._plan.swap[number]:
            forward = dataclasses.replace(forward, kept=self._offloads[stage].sent(instruction, forward.kept))
        if self._differentiable:
            self._forwards[number, index] = forward

    def _backward(self, stage: tuple[int, int], number: int, index: int) -> None:
        chunk, cotangents = self._plan.chunks[number], self._cotangents[index]
        forward = self._forwards.pop((number, index))
        if self._offloads:
            forward = dataclasses.replace(forward, kept=self._offloads[stage].fetched(forward.kept))
        inputs = [self._values[index][key] for key in chunk.inputs]
        given = [_total(cotangents.pop(key, [])) for key in chunk.outputs]
        passes = self._plan.passes(chunk, self._training, self._inherited[number], inputs, True)
        # Nobody may use the losses that layers have added.
        loss_cotangent = self.loss_cotangents[index] if self.loss_cotangents else None
        self._turns[stage], of_inputs, of_weights = passes.backward(self._turns[stage], forward, given, loss_cotangent)
        self.add_cotangents(index, chunk.inputs, of_inputs)
        self._weight_gradients[number, index] = of_weights

    def _weights(self, stage: tuple[int, int], number: int, index: int) -> None:
        left = self._weight_gradients.pop((number, index))
        self._turns[stage], gradients = left.compute(self._turns[stage])
        self._sums[stage[0]].add(self._plan.chunks[number], gradients, left.products)

    def _inputs_of(self, kind: str, number: int, index: int) -> list[tf.Tensor]:
        chunk = self._plan.chunks[number]
        if kind == "forward":
            return pack([self._values[index][key] for key in chunk.inputs])[0]
        cotangents = self._cotangents[index]
        return [t for key in chunk.outputs for pair in cotangents.get(key, []) for t in pair if t is not None]

    def outputs_of(self, index: int) -> list[Value]:
        """The model's outputs for one micro-batch."""
        return [self._values[index][key] for key in self._plan.graph.outputs]

    def output(self, key: int) -> Value:
        """One of the model's outputs, of the whole batch."""
        with tf.device(self._plan.device_of_value(key)):
            parts = zip(*(values[key] for values in self._values), strict=True)
            return Value(*(None if part[0] is None else self._micro_batches.join(list(part)) for part in parts))

    def add_cotangents(self, index: int, keys: Sequence[int], cotangents: Sequence[Gradients]) -> None:
        """Adds gradients of values, for one micro-batch."""
        for key, cotangent in zip(keys, cotangents, strict=True):
            self._cotangents[index].setdefault(key, []).append(cotangent)

    def gradient_of_input(self, key: int) -> tf.Tensor | None:
        """Gradient of one of the model's inputs; `None` if there is none."""
        pieces = [_total(cotangents.get(key, [])).tensor for cotangents in self._cotangents]
        return None if any(piece is None for piece in pieces) else self._micro_batches.join(pieces)

    def gradients_of_chunks(self) -> list[Any]:
        """The gradients of the first chunk's variables, then of the second one's, and so on; `None` where none is."""
        total, *others = (sums.of_chunks() for sums in self._sums)
        devices = [self._plan.device_of(chunk.index) for chunk in self._plan.chunks for _ in chunk.trainable]
        for other in others:
            for i, (device, gradient) in enumerate(zip(devices, other, strict=True)):
                # On the first pipeline: the sum of a pipeline travels, not the gradient of each micro-batch.
                with tf.device(device):
                    total[i] = added(total[i], gradient)
        return total

    def gradients_of_variables(self) -> dict[int, Any]:
        """The gradients by the variables' ids, on their devices; `None` for variables without one."""
        variables = [variable for chunk in self._plan.chunks for variable in chunk.trainable]
        total: dict[int, Any] = {}
        for variable, gradient in zip(variables, self.gradients_of_chunks(), strict=True):
            # Several chunks may use a variable.
            with tf.device(self._plan.device_of(self._plan.homes[id(variable)])):
                total[id(variable)] = added(total.get(id(variable)), gradient)
        return total

    def assign_state(self) -> None:
        """Writes the layers' state after the last micro-batches to the variables that layers have changed.

        Of several pipelines, statistics are averaged, weighted by rows; of whole numbers (seeds) the first one's count.
        What they add to metrics of layers is added up.
        """
        replicas = range(self._plan.replicas)
        rows = [sum(self._micro_batches.weight(r * self._each + i) for i in range(self._each)) for r in replicas]
        changed = []
        for chunk in self._plan.chunks:
            with tf.device(self._plan.device_of(chunk.index)):
                for i, variable in enumerate(chunk.state):
                    values, before = [self._state[r][chunk.index][i] for r in replicas], self._initial_state
                    if values[0] is before[0][chunk.index][i]:
                        continue
                    if id(variable) in self._plan.metrics:
                        added_to_it = [v - before[r][chunk.index][i] for r, v in enumerate(values)]
                        variable._value.assign_add(tf.add_n(added_to_it))
                        continue
                    changed.append(variable)
                    if len(values) == 1 or not values[0].dtype.is_floating:
                        variable._value.assign(values[0])
                    else:
                        parts = [v * tf.cast(w, v.dtype) for v, w in zip(values, rows, strict=True)]
                        variable._value.assign(tf.add_n(parts))
        warn_of_updates(self._plan.model, changed, self._micro_batches.count)


def read_trainable(plan: PipelinePlan) -> list[list[tf.Tensor]]:
    """The values of the trainable variables of each chunk, on its device, read once for all micro-batches."""
    return [_read([v._value for v in chunk.trainable], plan.device_of(chunk.index)) for chunk in plan.chunks]


def _read(values: Sequence[Any], device: str) -> list[tf.Tensor]:
    with tf.device(device):
        return [tf.identity(value) for value in values]


def _reseeded(state: tf.Tensor, replica: int) -> tf.Tensor:
    return state + tf.constant([replica * _SEED_STRIDE % 2**31, 0], state.dtype)


def _total(gradients: Sequence[Gradients]) -> Gradients:
    """The sum of the gradients of one value, on the current device: that of the chunk that has computed it."""
    parts = [[part for part in of_part if part is not None] for of_part in zip(*gradients, strict=True)]
    return Gradients(*(tf.add_n(found) if len(found) > 1 else next(iter(found), None) for found in parts))


class ActivationOffload:
    """Moves what micro-batches keep on a stage for their backward pass to the host, and back before it is needed.

    instructions of the stage   F0   F1   F2   F3 ... B0   B1
    to the host                      F0's F1's ...
    back                                          B0's B1's     one instruction before it is needed

    Before an instruction, the stage waits until what the forward pass before the last one has left is on the host.
    Otherwise the stage would run ahead of the copies, and what it leaves would pile up on the device.

    Args:
        policy: which host, how many instructions ahead something is fetched, and which tensors are too small.
        device: of the stage.
        order: its instructions.
    """

    def __init__(self, policy: MemoryPolicy, device: str, order: Sequence[Instruction]):
        self._device = device
        self._keeping = Keeping(Order(), _host_of(device, policy.host), policy.prefetch, policy.min_bytes)
        self._places = {instruction: i for i, instruction in enumerate(order)}
        # For each instruction so far: the tensors that are there when it begins. A copy back to the device waits for
        # those of an earlier instruction.
        self._begun: list[Sequence[tf.Tensor]] = []
        # Ids of the tensors on the host. They stay unique: the order of `_keeping` holds the tensors.
        self._copies: set[int] = set()

    def copy(self) -> ActivationOffload:
        """A copy for another backward pass: what was sent to the host is still there."""
        other = copy.copy(self)
        other._begun = list(self._begun)
        return other

    def begin(self, instruction: Instruction, begins_with: Sequence[tf.Tensor]) -> list[tf.Operation]:
        """Begins an instruction, with its inputs and the stage's turn; returns the copies to the host it waits for."""
        self._begun.append(begins_with)
        order = self._keeping.order
        return order.to_wait_for(order.begin_block()) if instruction.kind == "forward" else []

    def sent(self, instruction: Instruction, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """What a forward pass has left, each tensor on the host if it is large enough and not needed again too soon."""
        keeping = self._keeping
        away = self._places[instruction._replace(kind="backward")] - self._places[instruction]
        # Where that is so soon, it would be fetched back before it has been sent.
        if away <= keeping.prefetch + 1:
            return list(tensors)
        place = len(keeping.order.copies) - 1
        kept = [to_host(t, place, keeping) if is_data(t) and keeping.moves(t) else t for t in tensors]
        self._copies |= {id(copied) for copied, tensor in zip(kept, tensors, strict=True) if copied is not tensor}
        return kept

    def fetched(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The tensors that `sent` has returned, on the device, for the backward pass that begins now.

        A copy back begins when the instruction `prefetch` places before this one begins. If it came earlier, the device
        would hold it for longer; if it came with this instruction, that would have to wait for it.
        """
        gate = self._begun[max(0, len(self._begun) - 1 - self._keeping.prefetch)]
        return [from_host(t, self._device, self._keeping, gate) if id(t) in self._copies else t for t in tensors]


def _host_of(device: str, host: str) -> str:
    """The host of a stage: a device in the process of the stage."""
    spec: Any = tf.DeviceSpec.from_string(device)
    return spec.make_merged_spec(tf.DeviceSpec.from_string(host)).to_string()
