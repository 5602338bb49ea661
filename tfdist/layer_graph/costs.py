"""The costs of the calls of a model: counted in a graph that never runs, or measured."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import (
    deprecation,
    flops_registry,  # noqa: F401  registers what is asked for below
    ops,
)
from tfdist.layer_graph.graph import Call, LayerGraph
from tfdist.layer_graph.partition import Cost

# Size that is assumed for dimensions that the model leaves open, such as the length of a sequence.
_OPEN_DIMENSION = 128
# Writing a byte and reading it again takes as long as this many operations: 10 to 16 in image models on CPUs, where
# convolutions in single precision get 50 to 80 GFLOP/s, and elementwise layers 3 to 6 GB/s.
FLOPS_PER_BYTE = 10
# What a variable takes in training: itself, its gradient, and the two slots of an optimizer such as Adam.
_COPIES_IN_TRAINING = 4
_BYTES_OF_STRING = 16
_WARM_UPS, _RUNS = 2, 5
# Operations whose results are there all the time.
NOT_COMPUTED = frozenset({"ReadVariableOp", "Const", "VarHandleOp", "Placeholder"})


def costs_of(graph: LayerGraph, rows: int) -> list[Cost]:
    """Counts what each call costs for `rows` rows, without running any.

    Operations are counted by TensorFlow's profiler. It knows no loops (recurrent layers) and no custom operations:
    layers with those cost at least two operations per parameter for each row and time step. What a model leaves open,
    such as the length of a sequence, counts as 128.

    Raises:
        ValueError: if the model cannot be called with 128 for its open dimensions.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(5, use_bias=False)])
        >>> costs_of(flatten(model._functional), rows=4)
        [Cost(flops=400.0, parameter_bytes=200.0, output_bytes=80.0, seconds=0.0, frozen_bytes=0.0)]
    """
    costs: list[Cost] = []
    seen: set[int] = set()
    for call, operations, values in _called(graph, rows, training=False):
        new = [v for v in call.variables if id(v) not in seen]
        seen.update(map(id, new))
        parameter_bytes = float(sum(map(_variable_bytes, new)))
        output_bytes = float(sum(_tensor_bytes(values[key]) for key in call.outputs))
        frozen_bytes = float(sum(_variable_bytes(v) for v in new if not v.trainable))
        costs.append(Cost(_flops(call, operations, values), parameter_bytes, output_bytes, 0.0, frozen_bytes))
    return costs


def _called(
    graph: LayerGraph, rows: int, training: bool
) -> Iterator[tuple[Call, Sequence[tf.Operation], Mapping[int, Any]]]:
    """Calls the layers in a graph that never runs, with placeholders for the inputs.

    Yields:
        Each call, the operations that it adds, whose shapes are all known, and all values so far.
    """
    scratch = tf.__internal__.FuncGraph("tfdist_costs")
    # `StatelessScope` keeps the layers from changing their variables.
    with scratch.as_default(), keras.StatelessScope():
        inputs = {key: graph.shapes[key] for key in graph.inputs}
        values = {k: tf.compat.v1.placeholder(dtype, _filled(shape, rows)) for k, (shape, dtype) in inputs.items()}
        for call in graph.calls:
            before = len(scratch.get_operations())
            _run(call, values, graph, training)
            yield call, scratch.get_operations()[before:], values


def kept_bytes(graph: LayerGraph, rows: int) -> list[float]:
    """Counts what each call makes that its backward pass reads, and what it returns, without running any.

    For simple layers that is what they return. An attention layer returns a small part of the scores that it keeps.

    Raises:
        ValueError: as for `costs_of`.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> inputs = keras.Input((64, 8))
        >>> model = keras.Model(inputs, keras.layers.MultiHeadAttention(2, 4)(inputs, inputs))
        >>> costs_of(flatten(model), rows=1)[0].output_bytes, kept_bytes(flatten(model), rows=1)
        (2048.0, [76800.0])
    """
    found = []
    for call, made, values in _called(graph, rows, training=True):
        computed = {op.name for op in made if op.type not in NOT_COMPUTED}
        variables = [op.outputs[0] for op in made if op.type == "ReadVariableOp"]
        outputs = [values[key] for key in call.outputs]
        sources = list(filter(_is_counted, [*(values[key] for key in call.inputs.values()), *variables]))
        try:
            reads = _read_backward(list(filter(_is_counted, outputs)), sources)
        except ValueError as error:
            _explain(call, graph, error)
            raise
        kept = [*outputs, *(x for x in reads if x.op.name in computed and _is_counted(x))]
        found.append(float(sum(map(_tensor_bytes, {id(x): x for x in kept}.values()))))
    return found


def _read_backward(outputs: list[tf.Tensor], sources: list[tf.Tensor]) -> list[tf.Tensor]:
    """What operations read that compute the gradients of a call; nothing if there are none."""
    if not outputs:
        return []
    graph = outputs[0].graph
    before = len(graph.get_operations())
    try:
        # One source may have been made of another: what is before it belongs to another call.
        tf.gradients(outputs, sources, stop_gradients=sources)
    except LookupError:  # an operation has no gradient; training does not ask for one of the model's inputs
        return []
    return [x for op in graph.get_operations()[before:] for x in op.inputs]


def measured_costs(graph: LayerGraph, rows: int) -> list[Cost]:
    """Counts what each call costs, and measures how long it takes on the device in use.

    Each call is traced as a function of its own and run several times, on random numbers for floating-point inputs and
    on zeros for others; the median counts. This takes about as long as tracing the model's layers one by one.

    Raises:
        ValueError: as for `costs_of`.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> model = keras.Sequential([keras.Input((10,)), keras.layers.Dense(5)])
        >>> measured_costs(flatten(model._functional), rows=4)[0].seconds > 0
        True
    """
    costs = costs_of(graph, rows)
    values = {key: _sample(*graph.shapes[key], rows) for key in graph.inputs}
    seconds = []
    for call in graph.calls:
        seconds.append(_seconds_of(_compiled(call, values)))
        with keras.StatelessScope():
            _run(call, values, graph)
    return [cost._replace(seconds=value) for cost, value in zip(costs, seconds, strict=True)]


def weights(costs: Sequence[Cost], balance: str) -> list[float]:
    """The weight of each call when calls are balanced over stages.

    With "flops" an operation counts, and ten for each byte of output, which stands for the time of elementwise layers;
    with "memory" the bytes of outputs and of variables, with gradients and two optimizer slots for what is trained;
    with "time" measured seconds.

    Example:
        >>> weights([Cost(flops=100, parameter_bytes=8, output_bytes=10, frozen_bytes=4)], "memory")
        [30.0]
    """
    if balance == "flops":
        return [float(c.flops + FLOPS_PER_BYTE * c.output_bytes) for c in costs]
    if balance == "memory":
        trained = _COPIES_IN_TRAINING - 1
        return [
            float(c.output_bytes + c.parameter_bytes + trained * (c.parameter_bytes - c.frozen_bytes)) for c in costs
        ]
    return [c.seconds for c in costs]


def crossing(graph: LayerGraph) -> list[float]:
    """For each call, the bytes per row that a cut before it would send from earlier calls to it and later ones.

    A value that skips several stages counts at every cut that it passes. The model's inputs do not count: they come
    from outside, whichever stage takes them.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((2,)), keras.layers.Dense(5), keras.layers.Dense(3), keras.layers.Dense(1)]
        >>> crossing(flatten(keras.Sequential(layers)._functional))
        [0.0, 20.0, 12.0]
    """
    last_use = {key: position for position, call in enumerate(graph.calls) for key in call.inputs.values()}
    sent = [0.0] * len(graph.calls)
    for position, call in enumerate(graph.calls):
        for key in call.outputs:
            shape, dtype = graph.shapes[key]
            size = math.prod(_filled(shape, 1)) * _itemsize(dtype)
            for cut in range(position + 1, last_use.get(key, position) + 1):
                sent[cut] += size
    return sent


def _flops(call: Call, operations: Sequence[tf.Operation], values: Mapping[int, Any]) -> float:
    """Operations of a call; where the profiler cannot count them, an estimate from its parameters."""
    counted, multiplies, gathers, opaque = 0.0, False, False, False
    for operation in operations:
        counted += flops_of(operation)
        multiplies |= "MatMul" in operation.type or "Conv" in operation.type or operation.type == "Einsum"
        gathers |= "Gather" in operation.type
        opaque |= any(attribute.HasField("func") for attribute in operation.node_def.attr.values())
    if opaque or not (multiplies or gathers):
        return max(counted, _estimated_flops(call, values))
    return counted


def flops_of(operation: tf.Operation) -> float:
    """Operations of one node of a graph, as TensorFlow's profiler counts them; 0 where it cannot."""
    shapes = [tensor.shape for tensor in (*operation.inputs, *operation.outputs)]
    if not all(shape.is_fully_defined() for shape in shapes):
        return 0.0
    if operation.type == "Einsum":
        equation = operation.get_attr("equation").decode().split("->")[0].split(",")
        sizes = {
            label: size
            for labels, tensor in zip(equation, operation.inputs, strict=True)
            for label, size in _labelled(labels, tensor.shape.as_list())
        }
        return 2.0 * math.prod(sizes.values())
    if operation.type.startswith("BatchMatMul"):
        # The profiler takes the wrong dimension where the first argument is transposed.
        contracted = operation.inputs[0].shape[-2 if operation.get_attr("adj_x") else -1]
        return 2.0 * contracted * operation.outputs[0].shape.num_elements()
    try:
        with deprecation.silence():  # the registry itself calls deprecated functions
            return float(ops.get_stats_for_node_def(operation.graph, operation.node_def, "flops").value or 0)
    except ValueError:  # an operation that the profiler counts for some arguments only
        return 0.0


def _labelled(labels: str, shape: Sequence[int]) -> list[tuple[str, int]]:
    """Dimensions by their labels in an equation of Einsum; those in an ellipsis by their distance from the end."""
    if "..." not in labels:
        return list(zip(labels, shape, strict=True))
    before, after = labels.split("...")
    between = shape[len(before) : len(shape) - len(after)]
    numbered = [(f"...{len(between) - i}", size) for i, size in enumerate(between)]
    return [*zip(before, shape, strict=False), *numbered, *zip(after, shape[len(shape) - len(after) :], strict=True)]


def _estimated_flops(call: Call, values: Mapping[int, Any]) -> float:
    """Two operations per parameter of a matrix for each row and time step of the first input."""
    if not call.variables:
        return 0.0
    looked_up = {
        id(layer.embeddings) for layer in call.operation._flatten_layers() if isinstance(layer, keras.layers.Embedding)
    }
    matrices = sum(math.prod(v.shape) for v in call.variables if len(v.shape) >= 2 and id(v) not in looked_up)
    first = next((values[key] for key in call.inputs.values()), None)
    steps = math.prod(_filled(tuple(first.shape)[:-1], 1)) if first is not None else 1
    return 2.0 * matrices * steps


def _run(call: Call, values: dict[int, Any], graph: LayerGraph, training: bool = False) -> None:
    try:
        call.run(values, training=training)
    except Exception as error:
        _explain(call, graph, error)
        raise


def _explain(call: Call, graph: LayerGraph, error: Exception) -> None:
    """Says what an error of a layer may come from, if the model leaves dimensions open."""
    if opened := [shape for shape, _ in (graph.shapes[key] for key in graph.inputs) if None in shape[1:]]:
        raise ValueError(
            f"The layer '{call.name}' cannot be called with {_OPEN_DIMENSION} for the dimensions that the model leaves "
            f"open. Received: inputs of shape {opened}. Expected: layers that take any size, or inputs of known shape. "
            "Give keras.Input() the whole shape, or say where to cut with cuts=[...] of a PipelineStrategy, with "
            "blocks=[...] otherwise."
        ) from error


def _compiled(call: Call, values: Mapping[int, Any]) -> Callable[[], Any]:
    def run() -> list[tf.Tensor]:
        # The function captures its inputs. Passed as arguments, they would lose the masks that Keras has put on them.
        results = dict(values)
        with keras.StatelessScope():
            call.run(results, training=False)
        return [tf.convert_to_tensor(results[key]) for key in call.outputs]

    return tf.function(run, autograph=False).get_concrete_function()


def _seconds_of(run: Callable[[], Any]) -> float:
    """How long a function takes, on whatever devices it uses: the median of some runs, after some to warm up."""
    durations = []
    for _ in range(_WARM_UPS + _RUNS):
        begin = time.perf_counter()
        run()
        tf.test.experimental.sync_devices()
        durations.append(time.perf_counter() - begin)
    return statistics.median(durations[_WARM_UPS:])


def _sample(shape: Sequence[int | None], dtype: str, rows: int) -> tf.Tensor:
    kind = tf.as_dtype(dtype)
    if kind.is_floating:
        return tf.cast(np.random.default_rng(0).standard_normal(_filled(shape, rows)), kind)
    return tf.zeros(_filled(shape, rows), kind)


def _filled(shape: Sequence[int | None], rows: int) -> list[int]:
    """A shape without unknown dimensions; the first is the batch."""
    return [(_OPEN_DIMENSION if i else rows) if size is None else size for i, size in enumerate(shape)]


def _is_counted(value: Any) -> bool:
    """Whether it has a gradient and a size; what cuDNN keeps for itself tells none."""
    return isinstance(value, tf.Tensor) and value.dtype.is_floating and value.shape.rank is not None


def _tensor_bytes(tensor: Any) -> int:
    return math.prod(_filled(tuple(tensor.shape), 1)) * _itemsize(tensor.dtype)


def _variable_bytes(variable: keras.Variable) -> int:
    return math.prod(variable.shape) * _itemsize(variable.dtype)


def _itemsize(dtype: Any) -> int:
    kind = tf.as_dtype(dtype)
    return _BYTES_OF_STRING if kind == tf.string else kind.size
