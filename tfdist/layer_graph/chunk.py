"""A chunk: the consecutive calls of a model that one stage runs together."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import keras
import tensorflow as tf

from tfdist.layer_graph.graph import Call, LayerGraph
from tfdist.layer_graph.pure_call import PureResult, call_purely
from tfdist.layer_graph.values import Value, attached, value_of


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive calls, with their inputs and outputs.

    Attributes:
        index: the number of the chunk in the model, from 0.
        calls: the calls.
        inputs: keys of the values that it takes from the model's inputs and from earlier chunks.
        outputs: keys of the values that later chunks take or that the model returns.
        trainable: trainable variables of its layers.
        state: all other variables of its layers: statistics, seeds, frozen weights.
    """

    index: int
    calls: tuple[Call, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    trainable: tuple[keras.Variable, ...]
    state: tuple[keras.Variable, ...]

    def as_it_is(self) -> Chunk:
        """The same chunk with the variables that its layers have now: layers may have been frozen or unfrozen since."""
        trainable, state = _variables(self.calls)
        return dataclasses.replace(self, trainable=trainable, state=state)

    def call(self, inputs: Sequence[Value], training: bool) -> list[Value]:
        """Calls the layers as Keras would, in a call of their model; their variables may change."""
        values = dict(zip(self.inputs, map(attached, inputs), strict=True))
        with _tracing():
            for call in self.calls:
                call.run(values, training)
        return [value_of(values[key]) for key in self.outputs]

    def run(
        self,
        model: keras.Model,
        trainable: Sequence[tf.Tensor],
        state: Sequence[tf.Tensor],
        inputs: Sequence[Value],
        training: bool,
    ) -> PureResult:
        """Calls the layers, as a pure function of the variables' values and the inputs.

        Args:
            model: the model that the layers belong to.
            trainable: the values of the trainable variables.
            state: the values of the other variables.
            inputs: the values with the keys `inputs`.
            training: as in `model(x, training=training)`.

        Returns:
            The values with the keys `outputs`, the new state, and the losses that the layers have added.
        """
        # Keras stores masks as attributes of tensors. On copies (identities), no other user of the tensors sees them.
        own = [attached(value._replace(tensor=tf.identity(value.tensor))) for value in inputs]
        values = dict(zip(self.inputs, own, strict=True))

        def run() -> None:
            with _call_context(model, training), _tracing():
                for call in self.calls:
                    call.run(values, training)

        _, new_state, losses = call_purely(
            run,
            f"the layers {self.calls[0].name} to {self.calls[-1].name}",
            list(zip(self.trainable, trainable, strict=True)),
            list(zip(self.state, state, strict=True)),
        )
        return PureResult([value_of(values[key]) for key in self.outputs], new_state, losses)


def make_chunks(graph: LayerGraph, cuts: Sequence[int]) -> list[Chunk]:
    """Cuts the calls before each of the positions `cuts`, which increase."""
    pieces = [graph.calls[a:b] for a, b in zip((0, *cuts), (*cuts, len(graph.calls)), strict=True)]
    taken_by = [[key for call in piece for key in call.inputs.values()] for piece in pieces]
    chunks = []
    for index, piece in enumerate(pieces):
        made = {key for call in piece for key in call.outputs}
        needed = {*graph.outputs, *(key for later in taken_by[index + 1 :] for key in later)}
        # dict.fromkeys drops duplicates and keeps the order.
        chunks.append(
            Chunk(
                index,
                piece,
                tuple(dict.fromkeys(key for key in taken_by[index] if key not in made)),
                tuple(key for call in piece for key in call.outputs if key in needed),
                *_variables(piece),
            )
        )
    return chunks


def _variables(calls: Sequence[Call]) -> tuple[tuple[keras.Variable, ...], tuple[keras.Variable, ...]]:
    """The trainable variables of the calls' layers, and all others."""
    variables = list({id(v): v for call in calls for v in call.variables}.values())
    return tuple(v for v in variables if v.trainable), tuple(v for v in variables if not v.trainable)


def uncuttable(graph: LayerGraph) -> set[int]:
    """Positions at which not to cut: between two calls of one layer with a state, such as a BatchNormalization."""
    calls_of: dict[int, list[int]] = {}
    for position, call in enumerate(graph.calls):
        for variable in call.variables:
            # Frozen weights do not change, and several stages may read them.
            if not variable.trainable and not variable._value.trainable:
                calls_of.setdefault(id(variable), []).append(position)
    return {cut for positions in calls_of.values() for cut in range(positions[0] + 1, positions[-1] + 1)}


_traced = threading.local()


def is_traced() -> bool:
    """Whether the layers of a chunk are being called now; models among them then run as a part of it."""
    return getattr(_traced, "depth", 0) > 0


@contextlib.contextmanager
def _tracing() -> Iterator[None]:
    _traced.depth = getattr(_traced, "depth", 0) + 1
    try:
        yield
    finally:
        _traced.depth -= 1


@contextlib.contextmanager
def _call_context(model: keras.Model, training: bool) -> Iterator[None]:
    """Sets `training` for layers to which it is not passed, as `model(x, training=training)` does."""
    context = model._get_call_context()
    previous = context.get_value("training")
    context.set_value("training", training)
    try:
        yield
    finally:
        context.set_value("training", previous)
        model._maybe_reset_call_context()
