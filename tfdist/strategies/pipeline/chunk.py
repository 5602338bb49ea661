"""The forward and the backward pass of a chunk as TensorFlow functions, traced once and called for each micro-batch.

    forward:   turn, trainable, state, inputs       ->  turn, outputs, new state, losses, kept inputs, residuals
    backward:  turn, gradients of outputs,          ->  turn, gradients of inputs, gradients of trainable
               shared (weights, ...), kept (inputs, residuals)

Where the schedule has weight gradients of its own, a third function computes them:

    backward:  the same                             ->  turn, gradients of inputs, what the third function takes
    weights:   turn, these                          ->  turn, gradients of trainable

With one function for each pass, the graph of a training step stays small: it has two calls for every chunk and
micro-batch, whatever is inside. The backward function is made from the forward graph, as `tf.function` does it under a
`GradientTape`. But what is kept from one to the other (the residuals) is explicit here. A chunk that is recomputed
keeps its inputs only.

An output that nothing uses has no gradient, nor have the weights that it alone depends on: taken for zeros, these
gradients would let optimizers update the weights, and be multiplied by derivatives that may be infinite. So there is a
backward function for each set of outputs that have gradients; nearly always it is one.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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
from tfdist.memory.block import upstream
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


class _Derivative(NamedTuple):
    """A graph with gradients, before it is a function.

    Attributes:
        graph: the graph.
        given: in it, the gradients of outputs.
        gradients: in it, those of trainable variables and of inputs; `None` where there is none.
        captures: pairs of a tensor of the forward graph, and what stands for it.
    """

    graph: func_graph.FuncGraph
    given: list[tf.Tensor]
    gradients: list[Any]
    captures: list[tuple[tf.Tensor, tf.Tensor]]


class _Backward(NamedTuple):
    """A backward pass, for gradients of some of the outputs.

    Attributes:
        function: computes it.
        given: for each output, and for the losses at the end, whether the function takes its gradient.
        takes: which of the tensors that a forward pass has left it takes.
        gradients: those of trainable variables and of inputs, as they are in its graph; `None` where there is none.
        products: for each trainable variable, how the factors of its gradient are multiplied, if that is left for
            later.
        weights: computes the gradients of trainable variables of what `function` returns last; `None` if `function`
            returns these gradients.
    """

    function: atomic_function.AtomicFunction
    given: tuple[bool, ...]
    takes: Sequence[int]
    gradients: list[Any]
    products: list[RowProduct | None]
    weights: atomic_function.AtomicFunction | None


@dataclasses.dataclass(frozen=True)
class WeightGradients:
    """What the backward pass of one micro-batch has left of the gradients of a chunk's trainable variables.

    Attributes:
        gradients: as in `_Backward`, those of trainable variables.
        products: as in `_Backward`.
        tensors: the gradients, or what `function` takes.
        function: computes the gradients, if the backward pass has not.
    """

    gradients: list[Any]
    products: Sequence[RowProduct | None]
    tensors: Sequence[tf.Tensor] = ()
    function: atomic_function.AtomicFunction | None = None

    def compute(self, turn: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        """Returns the turn, and for each variable a gradient, or the two factors of a `RowProduct`, or `None`."""
        tensors = self.tensors
        if self.function is not None:
            turn, *tensors = self.function.call_flat(turn, *tensors)
        return turn, _filled(self.gradients, iter(tensors))


class Passes:
    """The forward and the backward pass of one chunk, for inputs of one kind.

    Args:
        chunk: the chunk.
        model: whose layers they are.
        training: as in `model(x, training=training)`.
        inherited: what layers to which it is not passed have from those before the chunk.
        recompute: whether the backward pass runs the forward pass again instead of keeping its residuals.
        split_weights: whether the backward pass leaves products over rows to be computed later.
        apart: whether it leaves all gradients of weights to a function of their own.
        specs: shapes and dtypes of the chunk's inputs.
        differentiable: whether a backward pass may follow.

    Attributes:
        handed_on: what layers after the chunk have of it, as `inherited`.
        of_batch: for each variable of `Chunk.state`, whether it is of a metric that is given one number for all rows.
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
        apart: bool,
        specs: Sequence[Value],
        differentiable: bool,
    ):
        self._chunk, self._model, self._training, self._specs = chunk, model, training, specs
        self._recompute, self._split_weights, self._apart, self._inherited = recompute, split_weights, apart, inherited
        # Profiles show this name.
        self._name = f"stage_chunk_{chunk.index}_{'train' if training else 'infer'}"
        self._variables = [tf.TensorSpec(v.shape, v._value.dtype) for v in (*chunk.trainable, *chunk.state)]
        graph = self._forward_graph("forward")
        self._check_captures(graph)
        self.captures = list(graph.external_captures)
        self._arguments, self._outputs = list(graph.inputs), list(graph.outputs)
        # By which outputs have gradients.
        self._backwards: dict[tuple[bool, ...], _Backward] = {}
        # Positions of the forward function's arguments that the backward function takes, too: those that all
        # micro-batches share, and those of one micro-batch.
        self._shared: list[int] = []
        self._kept: list[int] = []
        if differentiable:
            residuals = self._keep(graph)
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
        kept = results[len(self._outputs) :]
        taken = iter(results[: len(self._outputs)])
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
    ) -> tuple[tf.Tensor, list[Gradients], WeightGradients]:
        """Adds a call of the backward function to the graph.

        Args:
            turn: that of the call before it on the same device.
            forward: what the forward pass has left.
            cotangents: gradients of the outputs.
            loss_cotangent: gradient of the losses that the layers have added.

        Returns:
            What the next call on the same device waits for; the gradients of the chunk's inputs; those of its weights.
        """
        pairs = [
            (part, gradient)
            for value, cotangent in zip(forward.outputs, cotangents, strict=True)
            for part, gradient in zip(differentiable_parts(value), cotangent, strict=True)
            if part is not None
        ]
        if forward.loss is not None:
            pairs.append((forward.loss, loss_cotangent))
        used = tuple(gradient is not None for _, gradient in pairs)
        count = len(self._chunk.trainable)
        if not any(used):
            return turn, [Gradients() for _ in self._specs], WeightGradients([None] * count, [None] * count)
        found = self._backward_of(used)
        given = [
            # `tf.zeros_like` would keep the whole tensor for the backward pass; this keeps its shape only.
            tf.zeros(tf.shape(part), part.dtype) if gradient is None else gradient
            for (part, gradient), is_given in zip(pairs, found.given, strict=True)
            if is_given
        ]
        left = [*forward.shared, *forward.kept]
        turn, *results = found.function.call_flat(turn, *given, *(left[i] for i in found.takes))
        rest = iter(results)
        of_inputs = gradients_of(self._specs, _filled(found.gradients[count:], rest))
        return turn, of_inputs, WeightGradients(found.gradients[:count], found.products, list(rest), found.weights)

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
        of_batch = {id(variable) for metric in result.of_batch for variable in metric.variables}
        self.of_batch = [id(variable) in of_batch for variable in self._chunk.state]
        self._adds_losses = bool(result.losses)
        outputs, self._layout = pack(result.result)
        outputs += [new for new, changed in zip(result.state, self._changed, strict=True) if changed]
        if result.losses:
            outputs.append(tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float64)) for loss in result.losses]))
        return outputs

    def _keep(self, graph: func_graph.FuncGraph) -> list[tf.Tensor]:
        """Decides what the backward pass takes; returns what the forward function returns for it besides its inputs.

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
        self._graph, taken, made = graph, self._arguments, None
        every = (True,) * (len(differentiable(unpack(self._outputs, self._layout))) + self._adds_losses)
        if not self._recompute:
            made = self._differentiate(every)
            taken = [outer for outer, _ in made.captures]
        positions = {id(tensor): position for position, tensor in enumerate(self._arguments)}
        passed = [positions[id(tensor)] for tensor in taken if id(tensor) in positions]
        residuals = [tensor for tensor in taken if id(tensor) not in positions]
        begin = len(self._variables)
        own = range(begin, begin + len(pack(self._specs)[0]))
        self._shared = [position for position in passed if position not in own]
        self._kept = [position for position in passed if position in own]
        # What a forward pass leaves, in the order of `Forward.shared` and `Forward.kept`.
        self._left = [*(self._arguments[i] for i in (*self._shared, *self._kept)), *residuals]
        if made is not None:
            self._backwards[every] = self._finish(made, every)
        return residuals

    def _backward_of(self, used: tuple[bool, ...]) -> _Backward:
        """The backward pass for gradients of these outputs."""
        if used not in self._backwards:
            # Without a device in it, a function runs where it is called.
            with tf.device(None):
                self._backwards[used] = self._finish(self._differentiate(used), used)
        return self._backwards[used]

    def _differentiate(self, used: tuple[bool, ...]) -> _Derivative:
        """Adds the gradients of these outputs to a graph: one of their own, or one that computes the forward pass."""
        if self._recompute:
            source = graph = self._forward_graph("recompute")
            arguments, outputs = source.inputs, source.outputs
        else:
            source, arguments, outputs = self._graph, self._arguments, self._outputs
            with source.as_default():
                graph = func_graph.FuncGraph(f"{self._name}_backward")
        ys = differentiable(unpack(outputs, self._layout))
        if self._adds_losses:
            ys.append(outputs[-1])
        ys = [y for y, is_used in zip(ys, used, strict=True) if is_used]
        inputs = unpack(arguments[len(self._variables) :], pack(self._specs)[1])
        xs = [*arguments[: len(self._chunk.trainable)], *differentiable(inputs)]
        with graph.as_default(), marked_for_xla(xla_compiles(self._model)):
            given = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in ys]
            gradients = gradients_util._GradientsHelper(
                ys, xs, grad_ys=given, src_graph=None if self._recompute else source
            )
        captures = zip(self._arguments, arguments, strict=True) if self._recompute else graph.captures
        return _Derivative(graph, given, list(gradients), list(captures))

    def _finish(self, made: _Derivative, used: tuple[bool, ...]) -> _Backward:
        """Makes the functions of a backward graph."""
        graph, given, gradients, captures = made
        places = {id(tensor): place for place, tensor in enumerate(self._left)}
        if not all(used) and any(id(outer) not in places for outer, _ in captures):
            # It takes what forward passes have not left: an operation with several results takes zeros for the
            # gradients of some, in the shape of these. So it is the pass for all outputs, with zeros.
            every = (True,) * len(used)
            whole = self._differentiate(every)
            there = [w if g is not None else None for g, w in zip(gradients, whole.gradients, strict=True)]
            return self._finish(whole._replace(gradients=there), every)
        count = len(self._chunk.trainable)
        with graph.as_default():
            gradients, products = self._as_results(gradients)
            of_weights, of_inputs = (
                [tf.identity(t) for t in tf.nest.flatten(part, expand_composites=True) if t is not None]
                for part in (gradients[:count], gradients[count:])
            )
        weights = None
        if self._apart and of_weights:
            crossing, apart = _moved_apart(graph, of_inputs, of_weights, f"{self._name}_weights")
            weights = define(f"{self._name}_weights", apart, with_turn=True)
            with graph.as_default():
                of_weights = [tf.identity(tensor) for tensor in crossing]
        graph.inputs = [*given, *(inner for _, inner in captures)]
        graph.outputs = [*of_inputs, *of_weights]
        function = define(f"{self._name}_backward", graph, with_turn=True)
        return _Backward(function, used, [places[id(outer)] for outer, _ in captures], gradients, products, weights)

    def _as_results(self, gradients: Sequence[Any]) -> tuple[list[Any], list[RowProduct | None]]:
        """What functions can return, as they return tensors only: each gradient becomes none to three."""
        count, results = len(self._chunk.trainable), list(gradients)
        products: list[RowProduct | None] = [None] * count
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, tf.IndexedSlices) and i < count:
                shape = tf.constant(self._variables[i].shape.as_list(), gradient.indices.dtype)
                results[i] = tf.IndexedSlices(gradient.values, gradient.indices, shape)
            elif isinstance(gradient, tf.IndexedSlices):
                results[i] = tf.convert_to_tensor(gradient)
            elif i < count and self._split_weights and gradient is not None:
                products[i] = product = as_row_product(gradient)
                results[i] = gradient if product is None else (product.left, product.right)
        return results, products

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


def _filled(structure: Any, tensors: Iterator[tf.Tensor]) -> Any:
    """The structure with the next of these tensors in the places of its own."""
    flat = [t if t is None else next(tensors) for t in tf.nest.flatten(structure, expand_composites=True)]
    return tf.nest.pack_sequence_as(structure, flat, expand_composites=True)


def _moved_apart(
    graph: func_graph.FuncGraph, first: Sequence[tf.Tensor], later: Sequence[tf.Tensor], name: str
) -> tuple[list[tf.Tensor], func_graph.FuncGraph]:
    """Copies into a graph of its own what only the tensors `later` need, and not the tensors `first`.

    Returns:
        The tensors of `graph` that the other graph takes, and that graph, with copies of `later` as its outputs.
    """

    def before(operation: tf.Operation) -> list[tf.Operation]:
        return [tensor.op for tensor in operation.inputs]

    moved = upstream([tensor.op for tensor in later], before) - upstream([tensor.op for tensor in first], before)
    moved = {operation for operation in moved if operation.type != "Placeholder"}
    # Constants are in both graphs: XLA, for one, wants to know the axes of a sum.
    moved |= {operation for one in moved for operation in before(one) if operation.type == "Const"}
    copies: dict[int, tf.Tensor] = {}
    with graph.as_default():
        apart = func_graph.FuncGraph(name)
    for function in graph._functions.values():
        apart._add_function_recursive(function)
    with apart.as_default():
        # In the order in which they were made, each comes after those whose results it takes.
        for old in (operation for operation in graph.get_operations() if operation in moved):
            new = apart._create_op_internal(
                old.type,
                [copies.get(id(tensor), tensor) for tensor in old.inputs],
                [output.dtype for output in old.outputs],
                attrs={key: value for key, value in old.node_def.attr.items() if key != "_class"},
                op_def=old.op_def,
            )
            for output, copied in zip(old.outputs, new.outputs, strict=True):
                copied.set_shape(output.shape)
                copies[id(output)] = copied
        apart.outputs = [copies[id(tensor)] for tensor in later]
    apart.inputs = [inner for _, inner in apart.captures]
    return [outer for outer, _ in apart.captures], apart


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
