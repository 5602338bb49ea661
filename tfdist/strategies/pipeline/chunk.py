"""The forward and the backward pass of a chunk as TensorFlow functions, traced once and called for each micro-batch.

    forward:   turn, trainable, state, inputs       ->  turn, outputs, new state, losses, kept inputs, residuals
    backward:  turn, gradients of outputs,          ->  turn, gradients of trainable, gradients of inputs
               shared (weights, ...), kept (inputs, residuals)

With one function for each pass, the graph of a training step stays small: it has two calls for every chunk and
micro-batch, whatever is inside. The backward function is made from the forward graph, as `tf.function` does it under a
`GradientTape`. But what is kept from one to the other (the residuals) is explicit here. A chunk that is recomputed
keeps its inputs only.

Nothing in a function has a device: it runs where it is called, so that the pipelines of several replicas share it.

A scalar goes into each function and out of it, its turn: it makes one call come after another. Control dependencies
would say the same, but TensorFlow's executor looks at those last, and begins with what it has found last: a thread that
has computed something for another device would compute the next thing before it sends the first.

The gradients of weights are added up over the micro-batches of a step, as they come or as one product at the end.
Back-propagation of a dense layer makes two products: the gradient of its inputs, for which an earlier stage waits, and
that of its weights, for which nobody waits (zero-bubble pipelines, arXiv 2401.10241, split them for that reason).
Moreover `x1.T @ dy1 + x2.T @ dy2` is `concat(x1, x2).T @ concat(dy1, dy2)`: one larger product, without the additions,
each of which reads and writes as much memory as the layer has weights. So with weight_gradients="batched" a backward
pass leaves the factors of such a gradient, a `RowProduct`, and `GradientSums` multiplies them once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import atomic_function, attr_value_pb2, func_graph, gradients_util
from tfdist.layer_graph.chunk import (
    UNSEEDED,
    Chunk,
    Gradients,
    Value,
    call_context,
    context_values,
    differentiable,
    differentiable_parts,
    gradients_of,
    pack,
    unpack,
)
from tfdist.steps.keras_step import marked_for_xla, xla_compiles

_log = logging.getLogger("tfdist")
# Without this, Grappler (TensorFlow's graph optimizer) would inline the function at each of its calls. It would then
# merge what is recomputed with what was computed before, and nothing would be recomputed.
_ATTRIBUTES = {"_noinline": attr_value_pb2.AttrValue(b=True)}


@dataclasses.dataclass(frozen=True)
class Forward:
    """The results of the forward pass of one micro-batch.

    Attributes:
        outputs: the chunk's outputs, in the order of `Chunk.outputs`.
        state: the values of the chunk's non-trainable variables afterwards.
        loss: sum of the losses that the layers have added, a float64 scalar; `None` if there are none.
        shared: what the backward pass needs and all micro-batches have: weights, for one.
        kept: what it needs of this micro-batch: inputs, and what was computed.
        turn: what the next call on the same device waits for.
    """

    outputs: list[Value]
    state: list[tf.Tensor]
    loss: tf.Tensor | None
    shared: list[tf.Tensor]
    kept: list[tf.Tensor]
    turn: tf.Tensor


class Passes:
    """The forward and the backward pass of one chunk, for inputs of one kind.

    Args:
        chunk: the chunk.
        model: whose layers they are.
        training: as in `model(x, training=training)`.
        inherited: what layers to which it is not passed have from those before the chunk.
        recompute: whether the backward pass runs the forward pass again instead of keeping its residuals.
        split_weights: whether the backward pass leaves products over rows to be computed later.
        specs: shapes and dtypes of the chunk's inputs.
        differentiable: whether a backward pass may follow.

    Attributes:
        products: for each trainable variable, how the factors of its gradient are multiplied, if that is left for
            later.
        handed_on: what layers after the chunk have of it, as `inherited`.
        captures: tensors that the layers read, and are not passed.
    """

    def __init__(
        self,
        chunk: Chunk,
        model: keras.Model,
        training: bool | None,
        inherited: bool | None,
        recompute: bool,
        split_weights: bool,
        specs: Sequence[Value],
        differentiable: bool,
    ):
        self._chunk, self._model, self._training, self._specs = chunk, model, training, specs
        self._recompute, self._split_weights, self._inherited = recompute, split_weights, inherited
        # Profiles show this name.
        self._name = f"stage_chunk_{chunk.index}_{'train' if training else 'infer'}"
        self._variables = [tf.TensorSpec(v.shape, v._value.dtype) for v in (*chunk.trainable, *chunk.state)]
        graph = self._forward_graph("forward")
        self._check_captures(graph)
        self.captures = list(graph.external_captures)
        self._number_of_outputs = len(graph.outputs)
        self.products: list[RowProduct | None] = [None] * len(chunk.trainable)
        # Positions of the forward function's arguments that the backward function takes, too: those that all
        # micro-batches share, and those of one micro-batch.
        self._shared: list[int] = []
        self._kept: list[int] = []
        if differentiable:
            residuals = self._differentiate(graph)
            # The inputs that are kept come out again as outputs. So the backward pass takes tensors of this device.
            # Taking the inputs themselves, it would have the stage before send them a second time.
            with graph.as_default():
                inputs = [tf.identity(graph.inputs[i]) for i in self._kept]
            graph.outputs = [*graph.outputs, *inputs, *residuals]
        self._forward = define(f"{self._name}_forward", graph, with_turn=True)

    def forward(
        self, turn: tf.Tensor, trainable: Sequence[tf.Tensor], state: Sequence[tf.Tensor], inputs: Sequence[Value]
    ) -> Forward:
        """Adds a call of the forward function to the graph.

        Args:
            turn: that of the call before it on the same device.
            trainable: values of the trainable variables.
            state: values of the other variables.
            inputs: the chunk's inputs.
        """
        arguments = [*trainable, *state, *pack(inputs)[0], *self.captures]
        turn, *results = self._forward.call_flat(turn, *arguments)
        kept = results[self._number_of_outputs :]
        taken = iter(results[: self._number_of_outputs])
        outputs = unpack(taken, self._layout)
        new_state = [next(taken) if changed else old for changed, old in zip(self._changed, state, strict=True)]
        loss = next(taken) if self._adds_losses else None
        return Forward(outputs, new_state, loss, [arguments[i] for i in self._shared], kept, turn)

    def backward(
        self,
        turn: tf.Tensor,
        forward: Forward,
        cotangents: Sequence[Gradients],
        loss_cotangent: tf.Tensor | None,
    ) -> tuple[tf.Tensor, list[Gradients], list[Any]]:
        """Adds a call of the backward function to the graph.

        Args:
            turn: that of the call before it on the same device.
            forward: what the forward pass has left.
            cotangents: gradients of the outputs; what is missing counts as zeros.
            loss_cotangent: gradient of the losses that the layers have added.

        Returns:
            What the next call on the same device waits for; the gradients of the chunk's inputs; for each trainable
            variable a gradient (a tensor or `IndexedSlices`), or the two factors of a `RowProduct`, or `None`.
        """
        given = []
        for value, cotangent in zip(forward.outputs, cotangents, strict=True):
            pairs = zip(cotangent, differentiable_parts(value), strict=True)
            given += [_zeros_like(part) if c is None else c for c, part in pairs if part is not None]
        if self._adds_losses:
            given.append(tf.zeros([], tf.float64) if loss_cotangent is None else loss_cotangent)
        turn, *results = self._backward.call_flat(turn, *given, *forward.shared, *forward.kept)
        taken = iter(results)
        flat = [t if t is None else next(taken) for t in tf.nest.flatten(self._gradients, expand_composites=True)]
        gradients = tf.nest.pack_sequence_as(self._gradients, flat, expand_composites=True)
        count = len(self._chunk.trainable)
        return turn, gradients_of(self._specs, gradients[count:]), gradients[:count]

    def _forward_graph(self, suffix: str) -> func_graph.FuncGraph:
        def run(*flat: tf.Tensor) -> list[tf.Tensor]:
            with marked_for_xla(xla_compiles(self._model)):
                return self._run(list(flat))

        specs = [*self._variables, *pack(self._specs)[0]]
        return func_graph.func_graph_from_py_func(f"{self._name}_{suffix}", run, specs, {})

    def _run(self, flat: list[tf.Tensor]) -> list[tf.Tensor]:
        first, second = len(self._chunk.trainable), len(self._variables)
        state, inputs = flat[first:second], unpack(flat[second:], pack(self._specs)[1])
        with call_context({"training": self._inherited}):
            result = self._chunk.run(flat[:first], state, inputs, self._training, context_values())
            self.handed_on = context_values()["training"]
        self._changed = [new is not old for new, old in zip(result.state, state, strict=True)]
        self._adds_losses = bool(result.losses)
        outputs, self._layout = pack(result.result)
        outputs += [new for new, changed in zip(result.state, self._changed, strict=True) if changed]
        if result.losses:
            outputs.append(tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float64)) for loss in result.losses]))
        return outputs

    def _differentiate(self, graph: func_graph.FuncGraph) -> list[tf.Tensor]:
        """Makes the backward function; returns what the forward function has to return for it besides its inputs.

        Kept residuals: the gradients go into a graph of their own. What they use of the forward graph, it captures.

            forward    inputs ──> ... residuals ... ──> outputs
                          └────────────┐ │
            backward                   v v     <── gradients of outputs       captures: inputs, residuals

        Recomputed: one graph computes the forward pass again and then the gradients.

            forward    inputs ──────────────────────> outputs
                          └──────┐
            backward             v  ... again ...  <── gradients of outputs   arguments: inputs
        """
        if self._recompute and _draws_unseeded(graph):
            _log.warning(
                "%s keeps what it has computed instead of recomputing it: a layer draws random numbers that would be "
                "others the second time. Use keras.random with a keras.random.SeedGenerator.",
                self._name,
            )
            self._recompute = False
        source = self._forward_graph("recompute") if self._recompute else graph
        ys = differentiable(unpack(source.outputs, self._layout))
        if self._adds_losses:
            ys.append(source.outputs[-1])
        count, begin = len(self._chunk.trainable), len(self._variables)
        inputs = unpack(source.inputs[begin:], pack(self._specs)[1])
        xs = [*source.inputs[:count], *differentiable(inputs)]
        with source.as_default():
            backward = source if self._recompute else func_graph.FuncGraph(f"{self._name}_backward")
        with backward.as_default(), marked_for_xla(xla_compiles(self._model)):
            given = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in ys]
            gradients = gradients_util._GradientsHelper(
                ys, xs, grad_ys=given, src_graph=None if self._recompute else source
            )
            self._set_gradients(backward, gradients, count)
        # What the backward function takes besides the gradients of the outputs: arguments of the forward function, by
        # their positions, and residuals.
        passed, residuals = dict(enumerate(source.inputs)), []
        if not self._recompute:
            arguments = {id(t): i for i, t in enumerate(source.inputs)}
            captured = list(backward.captures)
            passed = {arguments[id(outer)]: inner for outer, inner in captured if id(outer) in arguments}
            residuals = [pair for pair in captured if id(pair[0]) not in arguments]
        own = range(begin, begin + len(pack(self._specs)[0]))
        self._shared = [position for position in passed if position not in own]
        self._kept = [position for position in passed if position in own]
        taken = [passed[position] for position in (*self._shared, *self._kept)]
        backward.inputs = [*given, *taken, *(inner for _, inner in residuals)]
        self._backward = define(f"{self._name}_backward", backward, with_turn=True)
        return [outer for outer, _ in residuals]

    def _set_gradients(self, graph: func_graph.FuncGraph, gradients: Sequence[Any], count: int) -> None:
        """Makes the outputs of a backward graph. Functions return tensors only: each gradient becomes none to three."""
        self._gradients = list(gradients)
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices):
                shape = tf.constant(self._variables[i].shape.as_list(), gradient.indices.dtype)
                self._gradients[i] = tf.IndexedSlices(gradient.values, gradient.indices, shape)
            elif i < count and self._split_weights and gradient is not None:
                self.products[i] = product = as_row_product(gradient)
                self._gradients[i] = gradient if product is None else (product.left, product.right)
        flat = tf.nest.flatten(self._gradients, expand_composites=True)
        graph.outputs = [tf.identity(t) for t in flat if t is not None]

    def _check_captures(self, graph: func_graph.FuncGraph) -> None:
        for tensor in graph.external_captures:
            if tensor.dtype == tf.resource:
                names = ", ".join(call.name for call in self._chunk.calls)
                raise ValueError(
                    "Received: a layer that reads a TensorFlow variable or a lookup table which is not one of its own "
                    f"variables, among {names}. It would be in another place than the stage, and a variable would not "
                    "be trained. Expected: variables made by `self.add_weight(...)`; lookup tables in the input "
                    "pipeline (`dataset.map`)."
                )


def _draws_unseeded(graph: func_graph.FuncGraph) -> bool:
    """Whether a graph, or a function that it calls, has random operations with a state of their own."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for function in definition.library.function for node in function.node_def)]
    return any(node.op in UNSEEDED for node in nodes)


def _zeros_like(tensor: tf.Tensor) -> tf.Tensor:
    # `tf.zeros_like` would keep the whole tensor for the backward pass; this keeps its shape only.
    return tf.zeros(tf.shape(tensor), tensor.dtype)


def define(name: str, graph: func_graph.FuncGraph, with_turn: bool = False) -> atomic_function.AtomicFunction:
    """The function of a graph; if wanted, with a turn before its inputs and before its outputs."""
    if with_turn:
        with graph.as_default():
            turn = tf.compat.v1.placeholder(tf.float32, [])
            graph.inputs, graph.outputs = [turn, *graph.inputs], [tf.identity(turn), *graph.outputs]
    number = tf.compat.v1.get_default_graph().unique_name(name) if not tf.executing_eagerly() else name
    return atomic_function.from_func_graph(f"__{number}_{id(graph)}", graph, _ATTRIBUTES)


@dataclasses.dataclass(frozen=True)
class RowProduct:
    """A weight gradient, before it is computed: the product of two tensors, summed over the rows of a micro-batch.

    Attributes:
        left: the first factor, with the rows in its first dimension.
        right: the second one.
        operation: the operation that would compute it, for its attributes.
        dtype: what the result is cast to.
        shape: what the result is reshaped to.
    """

    left: tf.Tensor
    right: tf.Tensor
    operation: tf.Operation
    dtype: tf.DType
    shape: tf.TensorShape

    def compute(self, lefts: Sequence[tf.Tensor], rights: Sequence[tf.Tensor]) -> tf.Tensor:
        """The sum of the products of several pairs of factors, by one operation on the current device."""
        left = tf.concat(lefts, 0) if len(lefts) > 1 else lefts[0]
        right = tf.concat(rights, 0) if len(rights) > 1 else rights[0]
        kind, operation = self.operation.type, self.operation
        if kind == "MatMul":
            product = tf.matmul(left, right, transpose_a=True)
        elif kind == "Einsum":
            product = tf.einsum(operation.get_attr("equation").decode(), left, right)
        else:
            product = tf.raw_ops.Conv2DBackpropFilter(
                input=left,
                filter_sizes=self.shape.as_list(),
                out_backprop=right,
                **{name: operation.get_attr(name) for name in _CONVOLUTION_ATTRIBUTES},
            )
        return tf.reshape(tf.cast(product, self.dtype), self.shape)


_CONVOLUTION_ATTRIBUTES = ("strides", "padding", "use_cudnn_on_gpu", "explicit_paddings", "data_format", "dilations")


def as_row_product(gradient: tf.Tensor) -> RowProduct | None:
    """The factors of a symbolic gradient, if it is a product over rows and nothing else; otherwise `None`."""
    if not gradient.shape.is_fully_defined():
        return None
    operation = gradient.op
    while operation.type in ("Cast", "Reshape", "Identity"):
        operation = operation.inputs[0].op
    if operation.type == "MatMul":
        usable = operation.get_attr("transpose_a") and not operation.get_attr("transpose_b")
        left, right = (0, 1)
    elif operation.type == "Einsum":
        usable, (left, right) = _sums_over_rows(operation), (0, 1)
    elif operation.type == "Conv2DBackpropFilter":
        usable, (left, right) = operation.outputs[0].shape == gradient.shape or _is_filter(operation, gradient), (0, 2)
    else:
        return None
    if not usable:
        return None
    return RowProduct(operation.inputs[left], operation.inputs[right], operation, gradient.dtype, gradient.shape)


def _sums_over_rows(operation: tf.Operation) -> bool:
    terms, _, result = operation.get_attr("equation").decode().partition("->")
    first, comma, second = terms.partition(",")
    return bool(comma and first and second) and first[0] == second[0] and first[0] not in result and "." not in terms


def _is_filter(operation: tf.Operation, gradient: tf.Tensor) -> bool:
    sizes = tf.get_static_value(operation.inputs[1])
    return sizes is not None and list(sizes) == gradient.shape.as_list()


class GradientSums:
    """The gradients of all chunks' trainable variables, added up over micro-batches on the devices of the chunks.

    Args:
        chunks: the chunks.
        device_of: the device of a chunk, by its index.
    """

    def __init__(self, chunks: Sequence[Chunk], device_of: Callable[[int], str]):
        self._chunks, self._device_of = chunks, device_of
        self._sums: dict[tuple[int, int], Any] = {}
        self._factors: dict[tuple[int, int], tuple[RowProduct, list]] = {}

    def add(self, chunk: Chunk, gradients: Sequence[Any], products: Sequence[RowProduct | None]) -> None:
        """Adds one micro-batch's gradients of a chunk, on the current device."""
        for i, (gradient, product) in enumerate(zip(gradients, products, strict=True)):
            if product is not None:
                self._factors.setdefault((chunk.index, i), (product, []))[1].append(gradient)
            elif gradient is not None:
                self._sums[chunk.index, i] = added(self._sums.get((chunk.index, i)), gradient)

    def of_chunks(self) -> list[Any]:
        """The gradients of the first chunk's variables, then of the second one's, and so on; `None` where none is."""
        # The products, which nothing has waited for, come last: each on the device of its chunk.
        for (index, i), (product, pairs) in self._factors.items():
            with tf.device(self._device_of(index)):
                lefts, rights = zip(*pairs, strict=True)
                self._sums[index, i] = product.compute(lefts, rights)
        self._factors = {}
        return [self._sums.get((chunk.index, i)) for chunk in self._chunks for i in range(len(chunk.trainable))]


def added(first: Any, second: Any) -> Any:
    """The sum of two gradients, each a tensor, `IndexedSlices` or `None`; of two sparse ones, it is sparse."""
    if first is None or second is None:
        return second if first is None else first
    if isinstance(first, tf.IndexedSlices) and isinstance(second, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([first.values, second.values], 0),
            tf.concat([first.indices, second.indices], 0),
            first.dense_shape,
        )
    return tf.convert_to_tensor(first) + tf.convert_to_tensor(second)
