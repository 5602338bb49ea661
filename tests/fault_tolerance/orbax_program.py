"""A training that Keras' OrbaxCheckpoint saves, and that goes on where it was, as Keras' documentation shows.

`python orbax_program.py FOLDER EPOCHS` prints what came of it as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import tfdist


def build() -> keras.Model:
    """A model whose layers have names: by them, its weights are found again."""
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(512, activation="relu", name="hidden")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1, name="output")(hidden), name="model")
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)  # else its slots are not there yet, and are not restored
    return model


class Counted(keras.callbacks.OrbaxCheckpoint):
    """Counts what it saves."""

    saves = 0

    def _save_checkpoint(self, step: int, logs: Any = None) -> None:
        self.saves += 1
        super()._save_checkpoint(step, logs)


def main(folder: str, epochs: int) -> None:
    """Trains, from the newest checkpoint on."""
    strategy = tfdist.MultiWorkerMirroredStrategy(peer_timeout=60)
    keras.utils.set_random_seed(1)
    x = np.random.RandomState(0).randn(96, 16).astype("float32")
    with strategy.scope():
        model = build()
    found = sorted(int(path.name) for path in Path(folder).glob("*") if path.name.isdigit())
    if found:
        model.load_weights(folder)
    callback = Counted(folder, max_to_keep=3)
    # The order of the rows does not depend on how many epochs there were before.
    begin = found[-1] + 1 if found else 0
    model.fit(
        *(x, x.sum(1, keepdims=True)),
        **{"batch_size": 16, "shuffle": False, "epochs": epochs, "initial_epoch": begin, "verbose": 0},
        callbacks=[callback],
    )
    total = [float(np.asarray(v, "float64").sum()).hex() for v in (*model.variables, *model.optimizer.variables)]
    print(json.dumps({"begin": begin, "saves": callback.saves, "sums": total}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
