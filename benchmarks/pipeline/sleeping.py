"""Layers that sleep instead of computing: the time of a step is then that of the schedule, and of its overhead."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

# Rows for which a layer sleeps as long as it is said to: a micro-batch.
ROWS = 4
FEATURES = 4


class Pace:
    """How long all layers sleep, in units of what they are made with.

    Attributes:
        scale: the factor, 0 at first: a model is traced in less time.
    """

    def __init__(self) -> None:
        self.scale = 0.0


class SleepingLayer(keras.layers.Layer):
    """Passes its input on, times a weight of ones, and sleeps; its backward pass does so, too.

    Args:
        forward: seconds of the forward pass of `ROWS` rows.
        backward: seconds of the backward pass.
        pace: changes both.
        device: held while it sleeps, so that layers of one device never sleep at the same time.
    """

    def __init__(self, forward: float, backward: float, pace: Pace, device: threading.Lock, name: str):
        super().__init__(name=name)
        # TensorFlow has weak references only.
        self._functions = [_sleeper(seconds, pace, device) for seconds in (forward, backward)]

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        forward, backward = self._functions

        @tf.custom_gradient
        def sleep(x: tf.Tensor) -> tuple[tf.Tensor, Callable]:
            return _call(forward, x), lambda gradient: _call(backward, gradient)

        # The weight comes first: its gradient needs the backward pass, which would be left out otherwise.
        return sleep(inputs * self.scale)


def _sleeper(seconds: float, pace: Pace, device: threading.Lock) -> Callable[[np.ndarray], np.ndarray]:
    def run(rows: np.ndarray) -> np.ndarray:
        with device:
            time.sleep(pace.scale * seconds * len(rows) / ROWS)
        return rows

    return run


def _call(function: Callable, x: tf.Tensor) -> tf.Tensor:
    # With stateful=True TensorFlow would run one at a time, on all devices together.
    return tf.ensure_shape(tf.numpy_function(function, [x], x.dtype, stateful=False), x.shape)
