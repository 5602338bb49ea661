"""The batch that every framework trains on, made once in memory."""

from __future__ import annotations

import numpy as np

from benchmarks.data_parallel.models import CLASSES, ModelShape


def make_batch(model: ModelShape, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Random examples (float32, channels last) and labels (int32), the same on every call.

    Example:
        >>> from benchmarks.data_parallel.models import MODELS
        >>> examples, labels = make_batch(MODELS["cnn"], 64)
        >>> examples.shape, labels.shape
        ((64, 28, 28, 1), (64,))
    """
    generator = np.random.default_rng(1)
    examples = generator.standard_normal((rows, *model.input_shape), dtype=np.float32)
    labels = generator.integers(0, CLASSES, rows, dtype=np.int32)
    return examples, labels
