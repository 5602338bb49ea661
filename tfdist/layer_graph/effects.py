"""What a graph does besides returning results, so that it cannot be run twice unnoticed."""

from __future__ import annotations

# Random operations with a state of their own: other numbers the second time.
UNSEEDED = frozenset(
    [
        *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "ParameterizedTruncatedNormal"),
        *("TruncatedNormal", "RandomGamma", "RandomPoissonV2", "RandomShuffle", "Multinomial"),
    ]
)
# What changes TensorFlow's variables, `tf.random.Generator`'s included.
CHANGING = frozenset(
    [
        *("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp", "RngReadAndSkip", "RngSkip"),
        *(
            f"ResourceScatter{what}"
            for what in ("Update", "Add", "Sub", "Mul", "Div", "Min", "Max", "NdUpdate", "NdAdd")
        ),
    ]
)
