"""Callbacks as users write them, which keep all kinds of things."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint import callback_state


def carry(one: keras.callbacks.Callback, new: keras.callbacks.Callback, *others: keras.callbacks.Callback) -> None:
    """Gives others the state of a callback that was made as `new` was."""
    arrays: dict[str, Any] = {}
    entries = callback_state.capture([one], callback_state.settings([new]), arrays)
    for other in others:
        callback_state.restore([other], callback_state.settings([other]), entries, arrays)


class Count:
    """A number, in a class of the user's own."""

    value = 0

    def get_state(self) -> int:
        """What is saved."""
        return self.value

    def set_state(self, state: int) -> None:
        """Takes it back."""
        self.value = state

    def __repr__(self) -> str:
        return f"Count(value={self.value})"


class Keeper(keras.callbacks.Callback):
    """Keeps its state in some of what a backup can hold; test_plain_data.py has all of it."""

    of_class: dict[int, int] = {}  # noqa: RUF012

    def __init__(self, settings: tuple[str, ...] = ("a", "b"), latest: list[np.ndarray] | None = None) -> None:
        super().__init__()
        self.settings, self.latest = set(settings), latest
        self.by_pair: dict[tuple[int, int], float] = {}
        self.text, self.count = b"", Count()
        self.variable, self.means = tf.Variable(0.0), {"batch": keras.metrics.Mean()}
        self.generator = np.random.default_rng(3)
        self.drawn: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.by_pair[batch, self.count.value] = logs["loss"]
        self.text += b"x"
        self.count.value += 1
        self.variable.assign_add(1.0)
        self.means["batch"].update_state(float(batch))
        self.drawn.append(self.generator.random())
        self.latest = [np.full(2, float(batch))]
        self.of_class[batch] = self.of_class.get(batch, 0) + 1

    @property
    def facts(self) -> dict[str, str]:
        """What it has come to."""
        facts = {name: repr(value) for name, value in vars(self).items() if name not in ("_model", "params")}
        mean = self.means["batch"]
        facts["of_class"] = repr(self.of_class)
        return {**facts, "means": repr([float(mean.result()), float(mean.count)]), "generator": "", "settings": ""}


class Thing:
    """What no backup can hold."""


class Forgetful(keras.callbacks.Callback):
    """Keeps what cannot be saved, and what need not be."""

    def __init__(self, passed: Thing) -> None:
        super().__init__()
        self.passed, self.thing, self.things = passed, Thing(), [Thing()]
        self.function = self.other = print
        self.dataset = tf.data.Dataset.range(3)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.layers, self.optimizer = self.model.layers, self.model.optimizer
        self.rate = self.model.optimizer.learning_rate
