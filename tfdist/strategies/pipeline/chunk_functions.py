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
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import atomic_function, attr_value_pb2, func_graph, gradients_util
from tfdist.layer_graph.chunk import Chunk
from tfdist.layer_graph.pure_call import UNSEEDED
from tfdist.layer_graph.values import (
    Gradients,
    Value,
    differentiable,
    differentiable_parts,
    gradients_of,
    pack,
    unpack,
)
from tfdist.strategies import xla
from tfdist.strategies.pipeline.weight_gradients import RowProduct, as_row_product

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
        loss: sum of the losses that the layers have added, a float32 scalar; `None` if there are none.
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


@dataclasses.dataclass(frozen=True)
class Backward:
    """The results of the backward pass of one micro-batch.

    Attributes:
        inputs: gradients of the chunk's inputs, in the order of `Chunk.inputs`.
        weights: for each trainable variable a gradient (a tensor or `IndexedSlices`), or the two factors of a
            `RowProduct` in a tuple, or `None`.
        turn: what the next call on the same device waits for.
    """

    inputs: list[Gradients]
    weights: list[Any]
    turn: tf.Tensor


class ChunkFunctions:
    """The functions of one chunk.

    Args:
        chunk: the chunk.
        model: whose layers they are.
        training: as in `model(x, training=training)`.
        recompute: whether the backward pass runs the forward pass again instead of keeping its residuals.
        split_weights: whether the backward pass leaves products over rows to be computed later.
    """

    def __init__(self, chunk: Chunk, model: keras.Model, training: bool, recompute: bool, split_weights: bool):
        self.chunk, self.model, self.training = chunk, model, training
        self.recompute, self.split_weights = recompute, split_weights
        self._traces: dict[Any, _Trace] = {}

    def trace(self, arguments: Sequence[Value], differentiable: bool) -> _Trace:
        """The functions for inputs of these shapes and dtypes.

        Args:
            arguments: the chunk's inputs.
            differentiable: whether a backward pass may follow.
        """
        specs = tuple(Value(*(None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in v)) for v in arguments)
        key = specs, differentiable, bool(self.model.jit_compile)
        if key not in self._traces:
            # Without a device in it, the function runs where it is called: several pipelines call it.
            with tf.device(None):
                self._traces[key] = _Trace(self, specs, differentiable)
        return self._traces[key]


class _Trace:
    def __init__(self, functions: ChunkFunctions, specs: Sequence[Value], differentiable: bool):
        self.functions, self.specs, self._recompute = functions, specs, functions.recompute
        chunk = functions.chunk
        # Profiles show this name.
        self._name = f"stage_chunk_{chunk.index}_{'train' if functions.training else 'infer'}"
        self._variables = [tf.TensorSpec(v.shape, v._value.dtype) for v in (*chunk.trainable, *chunk.state)]
        graph = self._forward_graph("forward")
        self._check_captures(graph)
        self._captures = list(graph.external_captures)
        self._number_of_outputs = len(graph.outputs)
        self.products: list[RowProduct | None] = [None] * len(chunk.trainable)
        self._residuals: list[tf.Tensor] = []
        # Positions of the forward function's arguments that the backward function takes, too: those that all
        # micro-batches share, and those of one micro-batch.
        self._shared: list[int] = []
        self._kept: list[int] = []
        if differentiable:
            self._differentiate(graph)
            # The inputs that are kept come out again as outputs. So the backward pass takes tensors of this device.
            # Taking the inputs themselves, it would have the stage before send them a second time.
            with graph.as_default():
                inputs = [tf.identity(graph.inputs[i]) for i in self._kept]
            graph.outputs = [*graph.outputs, *inputs, *self._residuals]
        self._forward = _define(f"{self._name}_forward", graph)

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
        chunk = self.functions.chunk
        arguments = [*trainable, *state, *pack(inputs)[0], *self._captures]
        turn, *results = self._forward.call_flat(turn, *arguments)
        kept = results[self._number_of_outputs :]
        taken = iter(results[: self._number_of_outputs])
        outputs = unpack(taken, self._layout)
        new_state = [next(taken) if changed else old for changed, old in zip(self._changed, state, strict=True)]
        loss = next(taken) if self._adds_losses else None
        assert len(outputs) == len(chunk.outputs)
        return Forward(outputs, new_state, loss, [arguments[i] for i in self._shared], kept, turn)

    def backward(
        self,
        turn: tf.Tensor,
        forward: Forward,
        cotangents: Sequence[Gradients],
        loss_cotangent: tf.Tensor | None,
    ) -> Backward:
        """Adds a call of the backward function to the graph.

        Args:
            turn: that of the call before it on the same device.
            forward: what the forward pass has left.
            cotangents: gradients of the outputs; what is missing counts as zeros.
            loss_cotangent: gradient of the losses that the layers have added.
        """
        given = []
        for value, cotangent in zip(forward.outputs, cotangents, strict=True):
            pairs = zip(cotangent, differentiable_parts(value), strict=True)
            given += [_zeros_like(part) if c is None else c for c, part in pairs if part is not None]
        if self._adds_losses:
            given.append(tf.zeros([]) if loss_cotangent is None else loss_cotangent)
        turn, *results = self._backward.call_flat(turn, *given, *forward.shared, *forward.kept)
        taken = iter(results)
        gradients = [_rebuild(kind, taken) for kind in self._gradient_kinds]
        count = len(self.functions.chunk.trainable)
        weights, floating = gradients[:count], gradients[count:]
        return Backward(gradients_of(self.specs, floating), weights, turn)

    def _forward_graph(self, suffix: str) -> func_graph.FuncGraph:
        def run(*flat: tf.Tensor) -> list[tf.Tensor]:
            with xla.marked(xla.compiles(self.functions.model)):
                return self._run(list(flat))

        specs = [*self._variables, *pack(self.specs)[0]]
        return func_graph.func_graph_from_py_func(f"{self._name}_{suffix}", run, specs, {})

    def _run(self, flat: list[tf.Tensor]) -> list[tf.Tensor]:
        chunk, functions = self.functions.chunk, self.functions
        first, second = len(chunk.trainable), len(self._variables)
        state, inputs = flat[first:second], unpack(flat[second:], pack(self.specs)[1])
        result = chunk.run(functions.model, flat[:first], state, inputs, functions.training)
        self._changed = [new is not old for new, old in zip(result.state, state, strict=True)]
        self._adds_losses = bool(result.losses)
        outputs, self._layout = pack(result.result)
        outputs += [new for new, changed in zip(result.state, self._changed, strict=True) if changed]
        if result.losses:
            outputs.append(tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in result.losses]))
        return outputs

    def _differentiated(self, graph: func_graph.FuncGraph) -> list[tf.Tensor]:
        """The outputs of a forward graph that gradients come back to."""
        found = differentiable(unpack(graph.outputs, self._layout))
        return [*found, graph.outputs[-1]] if self._adds_losses else found

    def _differentiate(self, graph: func_graph.FuncGraph) -> None:
        if self._recompute and _draws_unseeded(graph):
            _log.warning(
                "%s keeps what it has computed instead of recomputing it: a layer draws random numbers that would be "
                "others the second time. Use keras.random with a keras.random.SeedGenerator.",
                self._name,
            )
            self._recompute = False
        source = self._forward_graph("recompute") if self._recompute else graph
        ys = self._differentiated(source)
        count, begin = len(self.functions.chunk.trainable), len(self._variables)
        inputs = unpack(source.inputs[begin:], pack(self.specs)[1])
        xs = [*source.inputs[:count], *differentiable(inputs)]
        if self._recompute:
            # One graph computes the forward pass again and then the gradients. Its arguments are the gradients of the
            # outputs, and those arguments of the forward function that it uses: all of them.
            backward = source
            with backward.as_default(), xla.marked(xla.compiles(self.functions.model)):
                given = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in ys]
                gradients = gradients_util._GradientsHelper(ys, xs, grad_ys=given)
                self._set_gradients(backward, gradients, count)
            self._set_inputs(backward, given, dict(enumerate(backward.inputs)))
            self._backward = _define(f"{self._name}_backward", backward)
            return
        # The gradients go into a graph of their own. What they use of the forward graph, it captures: arguments of the
        # forward function, and what was computed (the residuals), which the forward function has to return for it.
        with source.as_default():
            backward = func_graph.FuncGraph(f"{self._name}_backward")
        with backward.as_default(), xla.marked(xla.compiles(self.functions.model)):
            given = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in ys]
            gradients = gradients_util._GradientsHelper(ys, xs, grad_ys=given, src_graph=source)
            self._set_gradients(backward, gradients, count)
        arguments = {id(t): i for i, t in enumerate(source.inputs)}
        captured = [(external, internal) for external, internal in backward.captures]
        residuals = [(e, i) for e, i in captured if id(e) not in arguments]
        self._residuals = [external for external, _ in residuals]
        self._set_inputs(backward, given, {arguments[id(e)]: i for e, i in captured if id(e) in arguments})
        backward.inputs = [*backward.inputs, *(i for _, i in residuals)]
        self._backward = _define(f"{self._name}_backward", backward)

    def _set_inputs(
        self, graph: func_graph.FuncGraph, given: Sequence[tf.Tensor], passed: dict[int, tf.Tensor]
    ) -> None:
        """Makes the inputs of a backward graph: the gradients of the outputs, then arguments of the forward function.

        Args:
            graph: the backward graph.
            given: its placeholders for the gradients of the outputs.
            passed: its other inputs, by the position of the argument of the forward function.
        """
        begin = len(self._variables)
        own = range(begin, begin + len(pack(self.specs)[0]))
        self._shared = [position for position in passed if position not in own]
        self._kept = [position for position in passed if position in own]
        graph.inputs = [*given, *(passed[position] for position in (*self._shared, *self._kept))]

    def _set_gradients(self, graph: func_graph.FuncGraph, gradients: Sequence[Any], count: int) -> None:
        """Makes the outputs of a backward graph. Functions return tensors only: each gradient becomes none to three."""
        self._gradient_kinds, outputs = [], []
        for index, gradient in enumerate(gradients):
            product = None
            if index < count and self.functions.split_weights and isinstance(gradient, tf.Tensor):
                product = self.products[index] = as_row_product(gradient)
            if gradient is None:
                self._gradient_kinds.append(None)
            elif isinstance(gradient, tf.IndexedSlices):
                self._gradient_kinds.append("sparse")
                shape = tf.constant(self._variables[index].shape.as_list(), gradient.indices.dtype)
                outputs += [gradient.values, gradient.indices, shape]
            elif product is not None:
                self._gradient_kinds.append("product")
                outputs += [product.left, product.right]
            else:
                self._gradient_kinds.append("dense")
                outputs.append(gradient)
        graph.outputs = [tf.identity(t) for t in outputs]

    def _check_captures(self, graph: func_graph.FuncGraph) -> None:
        for tensor in graph.external_captures:
            if tensor.dtype == tf.resource:
                names = ", ".join(call.name for call in self.functions.chunk.calls)
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


def _rebuild(kind: str | None, taken: Any) -> Any:
    if kind is None:
        return None
    if kind == "sparse":
        return tf.IndexedSlices(values=next(taken), indices=next(taken), dense_shape=next(taken))
    return (next(taken), next(taken)) if kind == "product" else next(taken)


def _define(name: str, graph: func_graph.FuncGraph) -> atomic_function.AtomicFunction:
    """The function of a graph, with a turn before its inputs and before its outputs."""
    with graph.as_default():
        turn = tf.compat.v1.placeholder(tf.float32, [])
        graph.inputs, graph.outputs = [turn, *graph.inputs], [tf.identity(turn), *graph.outputs]
    number = tf.compat.v1.get_default_graph().unique_name(name) if not tf.executing_eagerly() else name
    return atomic_function.from_func_graph(f"__{number}_{id(graph)}", graph, _ATTRIBUTES)
