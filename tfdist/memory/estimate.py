"""Estimates what each device holds in a training step, from its graph; no step is run.

batch            given as arrays, or derived from the model           batch_from
-> graph         of a training step for it                            trace_step
-> operations    what each reads and makes, and how large that is     operations_of
-> bytes held    while they run, in two possible orders               simulate
-> by device     weights, slots, the batch, the step at its peak      estimate
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import _DefaultDistributionStrategy, distribute_utils, unpack_singleton
from tfdist.inspection.model_state import parts_of, parts_of_variable
from tfdist.layer_graph.graph import functional_of
from tfdist.memory.block import GRADIENT, block_finder, record_blocks, upstream
from tfdist.steps.keras_step import shadowed


def batch_of(model: keras.Model, rows: int) -> tuple[Any, Any]:
    """Specifications of a batch, derived from the inputs, the outputs and the losses of a model.

    Targets look like outputs; those of sparse losses are numbers of classes.

    Raises:
        ValueError: if the model has unknown shapes.

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)])
        >>> model.compile("sgd", "sparse_categorical_crossentropy")
        >>> batch_of(model, 8)[1].shape
        TensorShape([8])
    """
    functional = functional_of(model)
    shapes = [tensor.shape for tensor in (*functional.inputs, *functional.outputs)] if functional else []
    if not shapes or any(size is None for shape in shapes for size in shape[1:]):
        raise ValueError(
            f"Received: model '{model.name}', whose inputs and outputs have no known shapes. Expected: "
            "data=(x, y), a batch of arrays, instead of batch_size; only its shapes and dtypes are looked at."
        )
    inputs = unpack_singleton(functional._inputs_struct)
    x = tree.map_structure(lambda t: tf.TensorSpec([rows, *t.shape[1:]], t.dtype), inputs)
    outputs = tree.flatten(functional.outputs)
    given = model._compile_loss._user_loss if model._compile_loss is not None else None
    if isinstance(given, dict):
        names = model.output_names if set(given) & set(model.output_names) else sorted(functional._outputs_struct)
        losses = [given.get(name) for name in names]
    else:
        losses = tree.flatten(given)
    losses = losses if len(losses) == len(outputs) else losses[:1] * len(outputs)
    y = [
        tf.TensorSpec([rows, *t.shape[1:-1]], tf.int32) if of_classes else tf.TensorSpec([rows, *t.shape[1:]], t.dtype)
        for t, of_classes in zip(outputs, map(_is_sparse, losses), strict=True)
    ]
    return x, tree.pack_sequence_as(unpack_singleton(functional._outputs_struct), y)


@contextlib.contextmanager
def batch_from(model: keras.Model, function: str, batch_size: int | None, data: Any) -> Iterator[Any]:
    """Gives the specifications of the batch that a user has described, and checks the model.

    Where the batch is derived from `batch_size`, errors in this context say which batch was assumed. A model that is
    not built is built from `data`.

    Raises:
        ValueError: if the step cannot be estimated, or the batch is not described in exactly one way.
    """
    if (data is None) == (batch_size is None):
        given = "neither batch_size nor data" if data is None else "both batch_size and data"
        raise ValueError(f"Received: {given}. Expected: one of them: batch_size=32, say, or data=(x, y).")
    batch = None if data is None else specifications_of(data)
    check_estimable(model, function, batch)
    if batch is not None:
        yield batch
        return
    batch = batch_of(model, batch_size)
    try:
        yield batch
    except (tf.errors.OpError, ValueError, TypeError, IndexError) as error:
        if str(error).startswith("Received: "):
            raise
        raise ValueError(
            f"Received: batch_size, for which a batch {batch} was assumed; a training step with it fails: {error}. "
            "Expected: data=(x, y), a batch of arrays, instead of batch_size; only its shapes and dtypes are looked at."
        ) from error


def check_estimable(model: keras.Model, function: str, batch: Any = None) -> None:
    """Checks that a training step of a model can be traced here; builds the model from a batch, as `fit` would."""
    if not isinstance(model, keras.Model) or not model.compiled or model.optimizer is None:
        raise ValueError(
            f"Received: {function}() for {model!r}. Expected: a keras.Model, after `model.compile(optimizer, loss)`."
        )
    strategy = model.distribute_strategy
    if not hooks_of(strategy).runs_whole_steps:
        raise ValueError(
            f"Received: {function}() for model '{model.name}' under {type(strategy).__name__}, whose steps run in "
            "other processes or in parts. Expected: the same model without a strategy, or under MirroredStrategy, "
            "MultiWorkerMirroredStrategy or HostOffloadStrategy."
        )
    if not model.built and batch is not None:
        with strategy.scope():
            model._symbolic_build(data_batch=symbolic(batch))
    if not model.built:
        raise ValueError(
            f"Received: {function}() for model '{model.name}', which is not built: its shapes are not known. Expected: "
            "data=(x, y), a batch of arrays, instead of batch_size; or `model.build(input_shape)`, or one call of the "
            "model, before."
        )


def specifications_of(data: Any) -> Any:
    """The specifications of a batch of arrays: `(x, y)` or `(x, y, sample_weight)`."""
    return tf.nest.map_structure(_specification, data)


def _specification(value: Any) -> tf.TensorSpec | None:
    if value is None:
        return None
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise ValueError(
            f"Received: a batch with a {type(value).__name__}, whose memory depends on its rows. Expected: tensors or "
            "arrays, such as the padded batch, `value.to_tensor()`."
        )
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        value = np.asarray(value)
    kind = tf.as_dtype(value.dtype)
    # As Keras casts arrays in `fit`.
    return tf.TensorSpec(value.shape, keras.backend.floatx() if kind == tf.float64 else kind)


def symbolic(batch: Any) -> Any:
    """A batch of symbolic tensors, for Keras' `_symbolic_build`."""
    return tf.nest.map_structure(
        lambda spec: None if spec is None else keras.KerasTensor(spec.shape, spec.dtype.name), batch
    )


def map_rows(batch: Any, function: Callable[[int | None], int | None]) -> Any:
    """The specifications of a batch with other numbers of rows; scalars and what is no tensor stay as they are."""

    def changed(spec: tf.TensorSpec | None) -> tf.TensorSpec | None:
        if spec is None or not spec.shape.rank:
            return spec
        return tf.TensorSpec([function(spec.shape[0]), *spec.shape[1:]], spec.dtype)

    return tf.nest.map_structure(changed, batch)


def _is_sparse(loss: Any) -> bool:
    loss = keras.losses.get(loss)
    names = (getattr(part, "__name__", "") for part in (type(loss), loss, getattr(loss, "fn", None)))
    return any("sparse" in name.lower() for name in names)


GRADIENTS, OPTIMIZER, OTHER = "gradients of weights", "optimizer", "loss and metrics"


def trace_step(model: keras.Model, batch: Any) -> tuple[tf.Graph, Mapping[str, str], Mapping[str, str]]:
    """Traces a training step as `fit` would: the model's `train_step` on each replica, in one graph for all of them.

    Nothing is computed, and variables stay as they are. While it is traced, operations of blocks are recorded, and so
    are the gradients that the optimizer gets. Returns `graph`, `forward` and `labels` of an `Estimate`.
    """
    strategy = model.distribute_strategy
    replicas = len(compute_devices(model))
    # Makes the variables of the optimizer and the metrics now. Keras would make them in the first step.
    built_from = symbolic(batch)
    with strategy.scope():
        # Also does what the strategy does before a fit. The method of the class: that of a model with mode "auto"
        # would take this batch for one of a fit.
        type(model)._maybe_symbolic_build(model, data_batch=built_from)
        if model._distribute_strategy is None:
            model._symbolic_build(data_batch=built_from)
    applied: list[tf.Tensor] = []

    @tf.autograph.experimental.do_not_convert
    def step(*batches: Any) -> Any:
        several = strategy.num_replicas_in_sync > 1
        data = distribute_utils.regroup(batches, always_wrap=True) if several else batches[0]
        return strategy.run(model.train_step, args=(data,))

    with record_blocks() as blocks, contextlib.ExitStack() as stack:
        for part in [model.optimizer, *parts_of(model.optimizer)]:
            stack.enter_context(_noted_gradients(part, applied))
        graph = tf.function(step, autograph=False).get_concrete_function(*[batch] * replicas).graph
    gradients = _gradient_operations([_through_views(tensor) for tensor in applied], blocks)
    block_of = block_finder(blocks)

    def label(operation: tf.Operation) -> str:
        if operation.name in gradients:
            return GRADIENTS
        rest = OPTIMIZER if model.optimizer.name in operation.name.split("/") else OTHER
        return block_of(operation.name) or rest

    return graph, blocks, {op.name: label(op) for op in graph.get_operations()}


def compute_devices(model: keras.Model) -> list[str]:
    """The devices of this process that compute a model's steps."""
    strategy = model.distribute_strategy
    # TensorFlow's strategy of models that were made outside of any scope.
    if isinstance(strategy, _DefaultDistributionStrategy):
        return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]
    return [short_device(device) for device in strategy.extended.worker_devices]


@contextlib.contextmanager
def _noted_gradients(optimizer: keras.Optimizer, noted: list[tf.Tensor]) -> Iterator[None]:
    """Records the gradients with which an optimizer updates weights."""
    update = optimizer._backend_apply_gradients

    def noting(gradients: Any, variables: Any) -> None:
        noted.extend(tf.nest.flatten(list(gradients), expand_composites=True))
        update(gradients, variables)

    with shadowed(optimizer, _backend_apply_gradients=noting):
        yield


def _gradient_operations(applied: Sequence[tf.Tensor], blocks: Mapping[str, str]) -> set[str]:
    """Names of the operations between the backward pass and the optimizer, including those that compute the gradients.

    On this way gradients may be scaled, clipped, packed and reduced.
    """

    def before(operation: tf.Operation) -> list[tf.Operation]:
        is_made_here = operation.name in blocks or GRADIENT in operation.name
        return [] if is_made_here else [tensor.op for tensor in operation.inputs]

    return {operation.name for operation in upstream([tensor.op for tensor in applied], before)}


def _through_views(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that a view (of a view, ...) shows."""
    while tensor.op.type in VIEWS and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


# Operations whose outputs take no memory of their own: they show their first input, or what is always there.
VIEWS = frozenset(
    {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "Snapshot"}
    | {"ReadVariableOp", "Placeholder", "VarHandleOp", "Const", "Bitcast", "EnsureShape"}
)
# Kernels that write their result into an input, if nothing else reads that.
_IN_PLACE = frozenset(
    {"Add", "AddV2", "AddN", "Sub", "Mul", "RealDiv", "Maximum", "Minimum", "SquaredDifference", "Pow", "Neg", "Exp"}
    | {"Log", "Sqrt", "Rsqrt", "Square", "Tanh", "Sigmoid", "Erf", "Relu", "Relu6", "Elu", "Selu", "Softmax", "BiasAdd"}
    | {"TanhGrad", "SigmoidGrad", "ReluGrad", "Relu6Grad", "EluGrad", "SqrtGrad", "RsqrtGrad", "SoftplusGrad"}
    | {"Abs", "Sign", "Reciprocal", "LogicalAnd", "LogicalOr", "LogicalNot", "Select", "SelectV2", "Cos", "Sin"}
    | {"Softplus"}
)
_CHANGE_NOTHING = frozenset({"ReadVariableOp", "Placeholder", "VarHandleOp", "ResourceGather"})
_FUNCTIONS = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("cond", "body")),
}


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a graph.

    Attributes:
        device: where it runs.
        inputs: the tensors that it reads, by number.
        outputs: the tensors that it makes, by number.
        sizes: of the outputs, in bytes.
        waits: positions of the operations of which it does not read anything, but for which it waits.
        is_view: whether its outputs share the memory of its first input.
        is_in_place: whether an output may overwrite an input that nothing else reads.
        inside: bytes that it needs only while it runs.
        label: what its outputs count as, such as the name of a block.
        name: its name in the graph.
    """

    device: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    waits: tuple[int, ...] = ()
    is_view: bool = False
    is_in_place: bool = False
    inside: int = 0
    label: str = ""
    name: str = ""


def operations_of(graph: tf.Graph, default_device: str, label: Callable[[tf.Operation], str]) -> list[Operation]:
    """The operations of a graph that matter for its outputs or change something.

    Shapes are static; what has none counts as nothing. `label` names what an operation makes.
    """
    every = graph.get_operations()
    used = _used(graph, every)
    number = {id(tensor): n for n, tensor in enumerate(tensor for op in every for tensor in op.outputs)}
    parts = [(op, inputs, outputs) for op in every if op in used for inputs, outputs in _parts(op)]
    place = {op: position for position, (op, _, _) in enumerate(parts)}
    return [
        Operation(
            device=short_device(op.device) or default_device,
            inputs=tuple(number[id(tensor)] for tensor in inputs),
            outputs=tuple(number[id(tensor)] for tensor in outputs),
            sizes=tuple(map(bytes_of, outputs)),
            waits=tuple(place[before] for before in op.control_inputs),
            is_view=op.type in VIEWS,
            is_in_place=op.type in _IN_PLACE,
            inside=_inside(graph, op, default_device),
            label=label(op),
            name=op.name,
        )
        for op, inputs, outputs in parts
    ]


def bytes_of(tensor: tf.Tensor) -> int:
    """The size of a tensor of known shape; 0 for resources and the like, which are only handles."""
    count = tensor.shape.num_elements()
    return 0 if count is None or tensor.dtype in (tf.resource, tf.variant, tf.string) else count * tensor.dtype.size


def short_device(device: str) -> str:
    """The name of a device of this process without the parts that are the same for all: "GPU:0".

    Example:
        >>> short_device("/job:localhost/replica:0/task:0/device:CPU:1")
        'CPU:1'
    """
    spec = tf.DeviceSpec.from_string(device)
    return f"{spec.device_type}:{spec.device_index}" if spec.device_type else ""


def _parts(op: tf.Operation) -> list[tuple[Sequence[tf.Tensor], Sequence[tf.Tensor]]]:
    """Inputs and outputs. TensorFlow takes an IdentityN apart before it runs a graph: no tensor waits for the others.

    Keras sends all gradients through one: no weight could be updated before the last gradient is there.
    """
    if op.type == "IdentityN" and not op.control_inputs:
        return [([given], [made]) for given, made in zip(op.inputs, op.outputs, strict=True)]
    return [(op.inputs, op.outputs)]


def _used(graph: tf.Graph, every: Sequence[tf.Operation]) -> set[tf.Operation]:
    """What TensorFlow keeps of a graph: what its outputs need, and what changes something."""
    ends = [tensor.op for tensor in getattr(graph, "outputs", [])]
    ends += [op for op in every if op.op_def.is_stateful and op.type not in _CHANGE_NOTHING]
    ends += list(getattr(graph, "control_outputs", []))
    return upstream(ends, lambda op: [*(tensor.op for tensor in op.inputs), *op.control_inputs])


def _inside(graph: tf.Graph, op: tf.Operation, default_device: str) -> int:
    """Bytes needed by the functions that an operation calls (branches, loop bodies): the largest number."""
    names = [op.get_attr(name).name for name in _FUNCTIONS.get(op.type, ())]
    bodies = [getattr(graph._get_function(name), "graph", None) for name in names]
    inside = (operations_of(body, default_device, lambda op: "") for body in bodies if body is not None)
    usages = (simulate(operations, as_made(operations)).values() for operations in inside)
    return max((sum(usage.peak for usage in of_body) for of_body in usages), default=0)


# Operations that read or write at most this many bytes are cheap: the executor runs them at once, and gives the others
# to its threads.
_LITTLE = 16384
# The order of TensorFlow's executor differs from run to run, and with it the peak, by up to about a tenth.
MARGIN = 1.1


def as_made(operations: Sequence[Operation]) -> list[int]:
    """The given order, except that an operation waits for those that it needs: updates of weights come last."""
    return _in_order(operations, lambda position, ready: position)


def newest_first(operations: Sequence[Operation]) -> list[int]:
    """Cheap operations first; of the others, the one that became ready last: updates follow their gradients."""
    size = {tensor: size for op in operations for tensor, size in zip(op.outputs, op.sizes, strict=True)}
    costs = [max(sum(op.sizes), *(size.get(tensor, 0) for tensor in op.inputs), 0) for op in operations]
    # What waits for nothing is run at the beginning, whatever it costs.
    is_first = [not op.waits and not any(tensor in size for tensor in op.inputs) for op in operations]
    is_cheap = [first or cost <= _LITTLE for first, cost in zip(is_first, costs, strict=True)]
    # Cheap operations before the others; of the cheap ones the oldest first, of the others the newest.
    return _in_order(operations, lambda position, ready: ready if is_cheap[position] else 2 * len(operations) - ready)


def _in_order(operations: Sequence[Operation], rank: Callable[[int, int], int]) -> list[int]:
    """Runs what is ready, the lowest rank first: by its position, and by how many became ready before it."""
    maker = {tensor: position for position, op in enumerate(operations) for tensor in op.outputs}
    followers: list[list[int]] = [[] for _ in operations]
    missing = [0] * len(operations)
    for position, op in enumerate(operations):
        for before in {*(maker[tensor] for tensor in op.inputs if tensor in maker), *op.waits}:
            followers[before].append(position)
            missing[position] += 1
    ready = [(rank(n, count), n) for count, n in enumerate(n for n, needed in enumerate(missing) if not needed)]
    seen = len(ready)
    heapq.heapify(ready)
    order = []
    while ready:
        _, position = heapq.heappop(ready)
        order.append(position)
        for following in followers[position]:
            missing[following] -= 1
            if not missing[following]:
                heapq.heappush(ready, (rank(following, seen), following))
                seen += 1
    return order


@dataclasses.dataclass
class Usage:
    """What one device holds.

    Attributes:
        peak: bytes at the peak.
        at_peak: bytes at the peak by label.
    """

    peak: int = 0
    at_peak: dict[str, int] = dataclasses.field(default_factory=dict)


def simulate(operations: Sequence[Operation], order: Sequence[int]) -> dict[str, Usage]:
    """Goes through the operations in this order, and counts the bytes that each device holds.

    A tensor that is read on another device is copied there, as soon as it is made. Tensors that no operation makes
    (weights, the batch) take no memory: they are there before the step, and stay.

    Example:
        >>> chain = [Operation("a", (), (0,), (8,)), Operation("a", (0,), (1,), (4,)), Operation("a", (1,), (2,), (1,))]
        >>> simulate(chain, range(3))["a"].peak
        12
    """
    run = Run(operations)
    for position in order:
        run.step(operations[position])
    return run.usage


@dataclasses.dataclass
class _Buffer:
    device: str
    size: int
    label: str
    readers: int = 0


class Run:
    """What is held so far: a buffer for each tensor that is still read, on each device where it is read."""

    def __init__(self, operations: Sequence[Operation]):
        self.usage = {op.device: Usage() for op in operations}
        self._labels = {device: collections.Counter[str]() for device in self.usage}
        self._now = dict.fromkeys(self.usage, 0)
        self._buffers: dict[tuple[int, str], _Buffer] = {}
        # How many operations of a device read a tensor.
        self._readers: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        for op in operations:
            for tensor in set(op.inputs):
                self._readers[tensor][op.device] += 1

    def step(self, op: Operation) -> None:
        """Runs one operation: makes its outputs, copies them to where they are read, and frees what nothing reads."""
        taken = [self._buffers.get((tensor, op.device)) for tensor in dict.fromkeys(op.inputs)]
        made: list[_Buffer] = []
        for size in op.sizes:
            buffer = self._shared(op, size, taken, made)
            if buffer is None:
                # A view of a tensor that is always there (a weight, the batch) takes no memory.
                buffer = self._allocate(op.device, 0 if op.is_view else size, op.label)
            made.append(buffer)
        self._note_peak(op.device, op.inside, op.label)
        for tensor, buffer in zip(op.outputs, made, strict=True):
            buffer.readers += self._readers[tensor][op.device]
            self._buffers[tensor, op.device] = buffer
            for device in self._readers[tensor].keys() - {op.device}:
                copy = self._allocate(device, buffer.size, op.label)
                copy.readers = self._readers[tensor][device]
                self._buffers[tensor, device] = copy
                self._note_peak(device)
        for buffer in taken:
            if buffer is not None:
                buffer.readers -= 1
        for buffer in (*taken, *made):
            if buffer is not None and not buffer.readers:
                self._now[buffer.device] -= buffer.size
                self._labels[buffer.device][buffer.label] -= buffer.size
                buffer.size = 0

    def held(self, device: str) -> dict[str, int]:
        """Bytes of a device by label, after the last step."""
        return {label: size for label, size in self._labels[device].items() if size}

    def _shared(self, op: Operation, size: int, taken: Sequence[_Buffer | None], made: list) -> _Buffer | None:
        """The buffer of an input that an output is in."""
        if op.is_view:
            return taken[0] if taken else None
        if op.is_in_place:
            for buffer in taken:
                if buffer is not None and buffer.readers == 1 and buffer.size == size and buffer not in made:
                    # The output overwrites the input, whose label no longer counts.
                    self._labels[op.device][buffer.label] -= size
                    self._labels[op.device][op.label] += size
                    buffer.label = op.label
                    return buffer
        return None

    def _allocate(self, device: str, size: int, label: str) -> _Buffer:
        self._now[device] += size
        self._labels[device][label] += size
        return _Buffer(device, size, label)

    def _note_peak(self, device: str, inside: int = 0, label: str = "") -> None:
        usage = self.usage[device]
        if self._now[device] + inside > usage.peak:
            usage.peak = self._now[device] + inside
            at_peak = self._labels[device] + collections.Counter({label: inside})
            usage.at_peak = {name: size for name, size in at_peak.items() if size}


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What one device holds in a training step; all sizes in bytes.

    Attributes:
        device: such as "GPU:0".
        weights: of the model's variables.
        slots: of the optimizer's.
        batch: of the inputs and targets of a replica.
        step: of the tensors that the step makes, at its peak: activations, gradients and intermediate results.
        at_peak: the same by block of the model, and for gradients of weights, optimizer, loss and metrics.
    """

    device: str
    weights: int
    slots: int
    batch: int
    step: int
    at_peak: dict[str, int]

    @property
    def total(self) -> int:
        """All of it, at the peak of the step."""
        return self.weights + self.slots + self.batch + self.step


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A training step, and what each device holds in it.

    Attributes:
        graph: of the step.
        forward: names of the operations of the forward pass, and of those that run it again, with their blocks.
        labels: what operations make, by their names: blocks, `GRADIENTS`, `OPTIMIZER` or `OTHER`.
        operations: of the graph.
        devices: those that hold something, those of the replicas first.
    """

    graph: tf.Graph
    forward: Mapping[str, str]
    labels: Mapping[str, str]
    operations: Sequence[Operation]
    devices: Sequence[DeviceMemory]


def estimate(model: keras.Model, batch: Any) -> Estimate:
    """Traces a training step for a global batch of these specifications, and runs through its operations."""
    replicas = compute_devices(model)
    strategy = model.distribute_strategy
    sharing, largest = strategy.num_replicas_in_sync, hooks_of(strategy).largest_piece
    # The replica with the most rows.
    on_each = map_rows(batch, lambda rows: math.ceil(rows * largest) if largest else -(-rows // sharing))
    graph, forward, labels = trace_step(model, on_each)
    operations = operations_of(graph, replicas[0], lambda op: labels[op.name])
    # Either order may be nearer to what happens. The larger peak is taken: too much is safer than too little.
    both = [simulate(operations, order(operations)) for order in (as_made, newest_first)]
    usages = max(both, key=lambda usages: sum(usage.peak for usage in usages.values()))
    weights = _bytes_by_device(part for variable in model.variables for part in parts_of_variable(variable))
    known = {
        id(part) for variable in (*model.variables, *model.metrics_variables) for part in parts_of_variable(variable)
    }
    slots = _bytes_by_device(variable for variable in graph.variables if id(variable) not in known)
    rows = sum(bytes_of(spec) for spec in tf.nest.flatten(on_each) if spec is not None)
    devices = []
    for name in dict.fromkeys([*replicas, *sorted({*usages, *weights, *slots})]):
        usage = usages.get(name, Usage())
        resident = weights[name], slots[name], rows * (name in replicas)
        devices.append(DeviceMemory(name, *resident, usage.peak, usage.at_peak))
    return Estimate(graph, forward, labels, operations, devices)


def _bytes_by_device(variables: Iterable[tf.Variable]) -> collections.Counter[str]:
    found: collections.Counter[str] = collections.Counter()
    for variable in variables:
        found[short_device(variable.device)] += variable.shape.num_elements() * variable.dtype.size
    return found
