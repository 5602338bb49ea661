"""Random seeds, and operations that give the same bits each time."""

from __future__ import annotations

import keras
import tensorflow as tf


def set_seed(seed: int, deterministic: bool = True) -> None:
    """Makes a training repeatable: the same program on as many processes computes the same bits again.

    Seeds Python, NumPy, TensorFlow and Keras as `keras.utils.set_random_seed` does, and lets TensorFlow use operations
    with a fixed order of additions only. Every process calls it with the same seed, before or after it makes its
    strategy, and before it makes data and models. Replicas still draw other dropout masks than each other.

    Args:
        seed: a whole number from 0 to 2**32 - 1.
        deterministic: whether operations have to be deterministic. On GPUs some of them take longer, and those that
            have no such form raise `tf.errors.UnimplementedError`; a `tf.data` map whose function draws random numbers
            works on one element at a time.

    Raises:
        ValueError: for another seed.

    Example:
        >>> import keras, tfdist
        >>> tfdist.set_seed(1)
        >>> first = keras.layers.Dense(2)(keras.ops.ones((1, 2)))
        >>> tfdist.set_seed(1)
        >>> bool((first == keras.layers.Dense(2)(keras.ops.ones((1, 2)))).numpy().all())
        True
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"Received: seed={seed!r}. Expected: a whole number from 0 to 2**32 - 1, which NumPy takes.")
    keras.utils.set_random_seed(seed)
    if deterministic:
        tf.config.experimental.enable_op_determinism()
