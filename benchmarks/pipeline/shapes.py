"""The models of which the speed is measured, for Keras and for PyTorch alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class DenseStack:
    """Dense layers with relu, all as wide as the data.

    Attributes:
        layers: how many.
        width: of each.
        batch: rows of a step.
    """

    layers: int
    width: int
    batch: int

    @property
    def title(self) -> str:
        return f"{self.layers} Dense layers of {self.width}, batch {self.batch}"

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (self.batch, self.width)


@dataclass(frozen=True)
class TransformerStack:
    """Transformer blocks: attention and a perceptron with relu, each with a connection around and a LayerNorm behind.

    Attributes:
        blocks: how many.
        width: of a position.
        heads: of an attention; each has its part of the width.
        length: positions of a sequence.
        batch: sequences of a step.
    """

    blocks: int
    width: int
    heads: int
    length: int
    batch: int

    @property
    def title(self) -> str:
        return (
            f"{self.blocks} Transformer blocks of {self.width} with {self.heads} heads, "
            f"batch {self.batch} of {self.length} positions"
        )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return (self.batch, self.length, self.width)

    @property
    def hidden(self) -> int:
        """Width of the perceptron's hidden layer."""
        return 4 * self.width


Shape: TypeAlias = DenseStack | TransformerStack

SHAPES: dict[str, Shape] = {
    "dense512": DenseStack(8, 512, 1024),
    "dense1536": DenseStack(8, 1536, 1024),
    "transformer": TransformerStack(blocks=4, width=256, heads=4, length=32, batch=64),
}
