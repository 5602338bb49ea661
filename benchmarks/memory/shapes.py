"""What is trained, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.pipeline.shapes import DenseStack

DEPTHS = (4, 8, 16)
# XLA compiles for so long that it is measured with one of them.
DEPTH_OF_XLA = 8
DROPOUT = 0.1


@dataclass(frozen=True)
class ResidualMlp:
    """Blocks of two Dense layers with gelu and Dropout between them, and an addition.

    Attributes:
        width: of what goes from block to block.
        hidden: of what is between the two layers.
        rows: of a batch.
    """

    width: int
    hidden: int
    rows: int

    @property
    def title(self) -> str:
        """How tables call it."""
        return f"Residual MLP, width {self.width}, {self.hidden} inside of a block, batch {self.rows}"

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of a batch."""
        return self.rows, self.width


@dataclass(frozen=True)
class Encoder:
    """Blocks of a Transformer: attention and two Dense layers, each with normalization, Dropout and an addition.

    Attributes:
        width: of a position.
        hidden: of what is between the two Dense layers.
        heads: of attention.
        length: positions of a row.
        rows: of a batch.
    """

    width: int
    hidden: int
    heads: int
    length: int
    rows: int

    @property
    def title(self) -> str:
        """How tables call it."""
        return (
            f"Transformer encoder, width {self.width} with {self.heads} heads, batch {self.rows} of {self.length} "
            "positions"
        )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The shape of a batch."""
        return self.rows, self.length, self.width


SHAPES: dict[str, ResidualMlp | Encoder] = {
    "mlp": ResidualMlp(width=64, hidden=256, rows=1024),
    "encoder": Encoder(width=64, hidden=256, heads=4, length=64, rows=16),
}

# With few rows the optimizer is a large part of a step, with many a small one.
SHARDED = {"few rows": DenseStack(4, 1024, 64), "many rows": DenseStack(4, 1024, 2048)}


def block_names(depth: int) -> list[str]:
    """The names of the blocks.

    Example:
        >>> block_names(2)
        ['block_0', 'block_1']
    """
    return [f"block_{index}" for index in range(depth)]
