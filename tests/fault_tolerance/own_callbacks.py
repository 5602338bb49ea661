"""Callbacks as users write them, which keep all kinds of things."""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class Count:
    """A number, in a class of the user's own."""

    value: int = 0


class Keeper(keras.callbacks.Callback):
    """Keeps its state in everything that a backup can hold."""

    def __init__(self, settings: tuple[str, ...] = ("a", "b")) -> None:
        super().__init__()
        self.settings = set(settings)
        self.by_pair: dict[tuple[int, int], float] = {}
        self.by_none: dict[None, int] = {}
        self.lists: dict[str, list[int]] = collections.defaultdict(list)
        self.seen: frozenset[int] = frozenset()
        self.text, self.number, self.path = b"", 0j, pathlib.Path("start")
        self.count, self.counts = Count(), []
        self.tensor, self.variable = tf.constant(0.0), tf.Variable(0.0)
        self.mean, self.means = keras.metrics.Mean(), {"batch": keras.metrics.Mean()}
        self.generator, self.python = np.random.default_rng(3), random.Random(4)
        self.drawn: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.by_pair[batch, self.count.value] = logs["loss"]
        self.by_none[None] = batch
        self.lists["batches"].append(batch)
        self.seen |= {batch}
        self.text, self.number, self.path = self.text + b"x", self.number + 1j, pathlib.Path(f"batch-{batch}")
        self.count.value += 1
        self.counts.append(Count(batch))
        self.tensor += 1
        self.variable.assign_add(1.0)
        self.mean.update_state(logs["loss"])
        self.means["batch"].update_state(float(batch))
        self.drawn += [self.generator.random(), self.python.random()]

    @property
    def facts(self) -> dict[str, str]:
        """What it has come to."""
        facts = {name: repr(value) for name, value in vars(self).items() if name not in ("_model", "params")}
        results = {"mean": self.mean, "means": self.means["batch"]}
        facts |= {name: repr([float(metric.result()), float(metric.count)]) for name, metric in results.items()}
        return {**facts, "generator": "", "python": "", "settings": ""}


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
