"""Trains a small network with a strategy, and prints its losses: strategy_program.py NAME."""

from __future__ import annotations

import sys

import keras
import numpy as np

import tfdist

strategy = getattr(tfdist, sys.argv[1])()
keras.utils.set_random_seed(1)
x = np.random.default_rng(1).normal(size=(512, 20)).astype("float32")
with strategy.scope():
    hidden = [keras.layers.Dense(units, activation="relu") for units in (32, 16)]
    model = keras.Sequential([keras.Input((20,)), *hidden, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
history = model.fit(x, x[:, :1] * 2, batch_size=64, epochs=2, verbose=0)
print("losses", *history.history["loss"], flush=True)
