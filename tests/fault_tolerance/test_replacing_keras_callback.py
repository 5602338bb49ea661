"""Scripts of strangers with `keras.callbacks.BackupAndRestore`: only the import is replaced, and a killed fit resumes.

Each is killed in the middle of an epoch by a callback of its own, started again, and has to end as the same script that
nobody has killed. With Keras' own callback it does not: the negative control.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.processes import forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(750)]

_DEADLINE = 240.0
KERAS, OURS = "from keras.callbacks import BackupAndRestore", "from tfdist.callbacks import BackupAndRestore"
# What is the same in all scripts: data, a death in the second epoch at the first start, and what is compared.
_HEAD = f"""
import glob, json, os, signal, time
import keras
import numpy as np
{KERAS}

keras.utils.set_random_seed(3)
x = np.random.default_rng(1).normal(size=(96, 8)).astype("float32")
y = x[:, :1] - x[:, 1:2]


class Death(keras.callbacks.Callback):
    steps = 0

    def on_train_batch_end(self, batch, logs=None):
        Death.steps += 1
        if Death.steps == 10 and "KILL" in os.environ:
            while not glob.glob("backup/checkpoint-*/manifest.json"):
                time.sleep(0.01)  # it is written in the background
            os.kill(os.getpid(), signal.SIGKILL)


def layers():
    return [keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]


def end(model, history):
    result = {{"history": history.history, "steps": Death.steps, "weights": [w.tolist() for w in model.get_weights()]}}
    with open("result.json", "w") as file:
        json.dump(result, file)
"""
SCRIPTS = {
    "positional arguments": """
model = keras.Sequential([keras.Input((8,)), *layers()])
model.compile("adam", "mse")
backup = BackupAndRestore("./backup", 4, True, False)
end(model, model.fit(x, y, 16, 3, callbacks=[backup, Death()], verbose=0))
""",
    "named arguments, among other callbacks, subclassed": """
class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.parts = layers()

    def call(self, x, training=False):
        for part in self.parts:
            x = part(x, training=training) if isinstance(part, keras.layers.Dropout) else part(x)
        return x

model = Network()
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse", metrics=["mae"])
callbacks = [
    keras.callbacks.ReduceLROnPlateau("loss", patience=0, factor=0.5),
    BackupAndRestore(backup_dir=os.path.join(os.getcwd(), "backup"), save_freq=2, delete_checkpoint=True),
    keras.callbacks.ModelCheckpoint("best.weights.h5", save_weights_only=True, save_best_only=True),
    keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True),
    Death(),
]
end(model, model.fit(x, y, batch_size=16, epochs=3, validation_split=0.25, callbacks=callbacks, verbose=0))
""",
    "inside of the scope of two devices": """
import tensorflow as tf
import tfdist
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tfdist.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    inputs = keras.Input((8,))
    outputs = inputs
    for layer in layers():
        outputs = layer(outputs)
    model = keras.Model(inputs, outputs)
    model.compile("adam", "mse")
    callbacks = [Death(), BackupAndRestore("backup", save_freq=3)]
    end(model, model.fit(x, y, batch_size=16, epochs=3, callbacks=callbacks, verbose=0))
""",
}


def end_of(folder: Path, text: str, code: int = 0, **env: str) -> dict:
    """Runs a script there; returns what it ends with."""
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(text)
    process = forked(["script.py"], folder / "log", folder, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **env})
    try:
        assert process.wait(_DEADLINE) == code, (folder / "log").read_text()[-3000:]
    finally:
        process.kill()
    return json.loads((folder / "result.json").read_text()) if code == 0 else {}


def results(tmp_path: Path, text: str) -> tuple[dict, dict]:
    """What a script ends with undisturbed, and after it was killed and started again."""
    first = end_of(tmp_path / "alone", text)
    end_of(tmp_path / "killed", text, -9, KILL="1")
    second = end_of(tmp_path / "killed", text)
    assert first.pop("steps") > second.pop("steps"), "the second start has done only what was left"
    return first, second


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCRIPTS)
def test_only_the_import_is_replaced(tmp_path, name):
    alone, resumed = results(tmp_path, (_HEAD + SCRIPTS[name]).replace(KERAS, OURS))
    assert resumed == alone
