"""A chunk: the consecutive calls of a model that one stage runs together."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import keras
import tensorflow as tf

from tfdist.layer_graph.graph import Call, LayerGraph
from tfdist.layer_graph.pure_call import call_purely
from tfdist.layer_graph.values import Value, attached, value_of


class ChunkResult(NamedTuple):
    """What a chunk makes of one micro-batch.

    Attributes:
        outputs: the values that later chunks, or the model's user, need.
        state: new values of the non-trainable variables, in their order; those that did not change are as before.
        losses: scalars that the layers have added.
    """

    outputs: list[Value]
    state: list[tf.Tensor]
    losses: list[tf.Tensor]


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """Consecutive calls, and what goes in and out.

    Attributes:
        index: its place in the model, from 0.
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
        """The same with the variables that its layers have now, as they are trained or frozen now."""
        trainable, state = _variables(self.calls)
        return dataclasses.replace(self, trainable=trainable, state=state)

    def call(self, inputs: Sequence[Value], training: bool) -> list[Value]:
        """Calls the layers as they are, in a call of their model."""
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
    ) -> ChunkResult:
        """Calls the layers, as a pure function of the variables' values and the inputs."""
        # Identities with attributes of their own: others may see the same tensors without a mask.
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
        return ChunkResult([value_of(values[key]) for key in self.outputs], new_state, losses)


def make_chunks(graph: LayerGraph, cuts: Sequence[int]) -> list[Chunk]:
    """Cuts the calls before each of the positions `cuts`, which increase."""
    pieces = [graph.calls[a:b] for a, b in zip((0, *cuts), (*cuts, len(graph.calls)), strict=True)]
    taken_by = [[key for call in piece for key in call.inputs.values()] for piece in pieces]
    chunks = []
    for index, piece in enumerate(pieces):
        made = {key for call in piece for key in call.outputs}
        needed = {*graph.outputs, *(key for later in taken_by[index + 1 :] for key in later)}
        # dict.fromkeys keeps the order and drops what comes again.
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
    """Those of the calls' layers that are trained, and all others."""
    variables = list({id(v): v for call in calls for v in call.variables}.values())
    return tuple(v for v in variables if v.trainable), tuple(v for v in variables if not v.trainable)


def uncuttable(graph: LayerGraph) -> set[int]:
    """Cut positions that would part the calls of a layer with a state of its own, such as BatchNormalization's."""
    calls_of: dict[int, list[int]] = {}
    for position, call in enumerate(graph.calls):
        for variable in call.variables:
            # Frozen weights do not change, and several stages may read them.
            if not variable.trainable and not variable._value.trainable:
                calls_of.setdefault(id(variable), []).append(position)
    return {cut for positions in calls_of.values() for cut in range(positions[0] + 1, positions[-1] + 1)}


_traced = threading.local()


def is_traced() -> bool:
    """Whether a chunk's layers are being called now: models inside of them run as part of it."""
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
    """What `model(x, training=training)` tells layers without a training argument of their own."""
    context = model._get_call_context()
    previous = context.get_value("training")
    context.set_value("training", training)
    try:
        yield
    finally:
        context.set_value("training", previous)
        model._maybe_reset_call_context()
