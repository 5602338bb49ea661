"""The language models that are trained, before PyTorch or Keras make them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Numbers of a language model: blocks of attention and a network of four times the width."""

    vocabulary: int
    length: int
    width: int
    heads: int
    blocks: int


# 10.8 million parameters.
SHAPE = Shape(256, 64, 384, 6, 6)
LEARNING_RATE, MOMENTUM = 0.01, 0.9
# Rows of each process.
BATCH = 4
