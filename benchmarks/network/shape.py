"""The language model that is trained: 10.8 million parameters, before PyTorch or Keras make it."""

from __future__ import annotations

VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 256, 64, 384, 6, 6
LEARNING_RATE, MOMENTUM = 0.01, 0.9
# Rows of each process.
BATCH = 4
