"""Calls of Keras layers as pure functions: values of variables go in and come out, and no variable changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

# Operations that do more than return results, so that running them twice differs from running them once.
# These draw random numbers from a state of their own: the second run draws other numbers.
UNSEEDED = frozenset(
    [
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "ParameterizedTruncatedNormal"),
        *("TruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle", "Multinomial"),
    ]
)
# These change variables of TensorFlow, such as the state of a `tf.random.Generator`.
CHANGING = frozenset(
    [
        *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "RngReadAndSkip", "RngSkip"),
        *(
            f"ResourceScatter{what}"
            for what in ("Update", "Add", "Sub", "Mul", "Div", "Min", "Max", "NdUpdate", "NdAdd")
        ),
    ]
)


class PureResult(NamedTuple):
    """The results of a pure call.

    Attributes:
        result: what the function has returned.
        state: new values of the non-trainable variables, in their order; the old value where one did not change.
        losses: scalars that the layers have added.
    """

    result: Any
    state: list[tf.Tensor]
    losses: list[tf.Tensor]


class ImpureError(ValueError):
    """A layer changes something that a pure function must not change."""


def call_purely(
    function: Callable[[], Any],
    what: str,
    trainable: Sequence[tuple[keras.Variable, Any]],
    state: Sequence[tuple[keras.Variable, Any]],
) -> PureResult:
    """Calls a function that calls layers, with other values in the place of their variables.

    Reads of a variable give the value passed here; assignments are collected and returned. So the graph has no
    operation that reads or assigns a variable, and can be run again.

    Args:
        function: the function.
        what: its name in messages, such as "block 'encoder'".
        trainable: the trainable variables of its layers, with the values that they have in this call.
        state: all other variables that it uses, with their values.

    Raises:
        ImpureError: if it changes a trainable variable, or one that is not listed.

    Example:
        >>> count = keras.Variable(1.0, trainable=False)
        >>> result = call_purely(lambda: count.assign_add(2.0), "f", [], [(count, tf.constant(5.0))])
        >>> float(result.state[0]), float(count)
        (7.0, 1.0)
    """
    with keras.StatelessScope(collect_losses=True) as scope:
        # The constructor of the scope would cast the values to the dtype in which the surrounding layers compute, and
        # frozen weights would come back in that dtype.
        scope.state_mapping.update({id(v): tf.cast(value, v._dtype) for v, value in [*trainable, *state]})
        mapped = dict(scope.state_mapping)
        result = function()
        new_state = [tf.convert_to_tensor(scope.get_current_value(variable)) for variable, _ in state]
        losses = [tf.convert_to_tensor(loss) for loss in scope.losses]
        for variable, _ in trainable:
            if scope.get_current_value(variable) is not mapped[id(variable)]:
                raise ImpureError(
                    f"Received: {what}, in which a layer assigns to its trainable variable {variable.path} when it is "
                    "called; that would be lost. Expected: layers assign to non-trainable variables only "
                    "(`add_weight(trainable=False)`)."
                )
    if scope.state_mapping.keys() - mapped.keys():
        raise ImpureError(
            f"Received: {what}, in which a layer changes a variable that it does not own; that would be lost. "
            "Expected: layers change their own variables only; give keras.random functions a SeedGenerator that is an "
            "attribute of the layer."
        )
    return PureResult(result, new_state, losses)
