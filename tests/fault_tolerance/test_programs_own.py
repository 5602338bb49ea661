"""A backup that somebody has changed turns no callback to another file or command; what training changes comes back."""

from __future__ import annotations

import json
import pathlib
import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdist
from tests.fault_tolerance.own_callbacks import carry
from tfdist.checkpoint import callback_state
from tfdist.checkpoint.callback_state import encode
from tfdist.checkpoint.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest

STAYS = "it is text or an argument of this program, which a backup does not change"


class Notify(keras.callbacks.Callback):
    """Runs a command at the end of each epoch, and keeps it in every place that one could think of."""

    command_of_class: Any = ("echo", "class")
    nothing_of_class: Any = None

    def __init__(self, command: list[str], folder: str, hook: str | None = None, retries: int = 1, **more: Any) -> None:
        super().__init__()
        self.command, self._folder, self.hook, self.retries = command, folder, hook, retries
        self.file = pathlib.Path(folder, "log.txt")
        self.options = {"path": folder, "nested": [{"command": command}], "count": 0}
        self.raw = folder.encode()
        self.extra: list[str] = more.get("extra", ["--quiet"])
        self.call = print
        self.log: list[str] = []
        self.phase, self.state = "warming", {"of": "mine", "epochs": 0}
        self.best_file: str | None = None
        self.count = 0

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.count += 1
        self.log.append(f"epoch {epoch}")
        self.phase = "cooling"
        self.state["epochs"] += 1
        self.options["count"] += 1
        self.best_file = f"{self._folder}/{epoch}"
        subprocess.run([*self.command, *self.extra], check=True)


class Inheriting(Notify):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)


def restored(callback: keras.callbacks.Callback, changes: dict[str, Any]) -> None:
    """Gives a callback the state that it has, with changes that somebody has made to it."""
    passed = callback_state.settings([callback])
    arrays: dict[str, Any] = {}
    (entry,) = callback_state.capture([callback], passed, arrays)
    state = {name: value for name, value in entry["state"]["dict"] if name not in changes}
    state |= {name: encode(value, arrays, "changed") for name, value in changes.items()}
    entry["state"] = {"dict": [[name, value] for name, value in state.items()]}
    callback_state.restore([callback], passed, [json.loads(json.dumps(entry))], arrays)


EVIL = ["rm", "-rf", "x"]
CHANGES = [
    {"command": EVIL},
    {"command": ["echo", "done", "x"]},
    {"command": "rm"},
    {"_folder": 5},
    {"_folder": "/etc"},
    {"_folder": pathlib.Path("/etc")},
    {"hook": "rm"},
    {"retries": 10**9},
    {"file": pathlib.Path("/etc/passwd")},
    {"options": {"path": "/etc", "nested": [{"command": ["echo", "done"]}], "count": 0}},
    {"options": {"path": "folder", "nested": [{"command": EVIL}], "count": 0}},
    {"options": {"path": "folder", "nested": [], "more": "rm"}},
    {"raw": b"/etc"},
    {"extra": ["--quiet", "--rsh=rm"]},
    {"call": "rm"},
    {"command_of_class": EVIL},
    {"nothing_of_class": "rm"},
    {"on_epoch_end": 5},
    {"set_model": EVIL},
]


@pytest.mark.parametrize("kind", [Inheriting])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_what_the_program_has_stays(kind: type[Notify], change: dict[str, Any]) -> None:
    callback = kind(command=["echo", "done"], folder="folder")
    before = dict(vars(callback))
    ((name, _),) = change.items()
    with pytest.warns(UserWarning) as caught:
        restored(callback, change)
    assert [str(warning.message).partition(". Expected: ")[0] for warning in caught] == [
        f"{kind.__name__}.{name} is in the backup and cannot be restored: {STAYS}"
    ]
    assert vars(callback) == before


@pytest.mark.filterwarnings("error")
def test_what_training_changes_comes_back() -> None:
    one, other = (Notify(command=["true"], folder="folder") for _ in range(2))
    one.set_model(keras.Sequential())
    for epoch in range(2):
        one.on_epoch_end(epoch)
    one.retries = other.retries
    carry(one, other, other)
    assert (other.count, other.phase, other.state) == (2, "cooling", {"of": "mine", "epochs": 2})
    assert (other.log, other.best_file, other.options) == (["epoch 0", "epoch 1"], "folder/1", one.options)


def rewrite(backup: Path, name: str, saved: Any) -> None:
    """Changes an attribute in the newest manifest as whoever may write to the folder can; the checksum is right."""
    path = max(backup.glob(f"checkpoint-*/{MANIFEST_NAME}"))
    manifest = decode_manifest(path.read_bytes())
    for entry in manifest.meta["callbacks"]:
        for pair in entry["state"]["dict"]:
            if pair[0] == name:
                pair[1] = saved
    path.write_bytes(encode_manifest(Manifest(manifest.meta, manifest.files, manifest.tensors)))


def test_model_checkpoint_writes_where_the_program_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
            if epoch == 2:
                raise RuntimeError("killed")

    def train(*more: keras.callbacks.Callback) -> None:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "mine.keras", monitor="loss", save_best_only=True)
        backup = tfdist.callbacks.BackupAndRestore(tmp_path / "backup", asynchronous=False)
        model.fit(np.ones((4, 3)), np.ones((4, 1)), epochs=3, verbose=0, callbacks=[checkpoint, backup, *more])

    with pytest.raises(RuntimeError, match="killed"):
        train(Failing())
    (tmp_path / "precious.keras").write_text("precious")
    rewrite(tmp_path / "backup", "filepath", str(tmp_path / "precious.keras"))
    (tmp_path / "mine.keras").unlink()
    with pytest.warns(UserWarning, match=rf"ModelCheckpoint\.filepath is in the backup and .*: {STAYS}"):
        train()
    assert (tmp_path / "precious.keras").read_text() == "precious"
    assert (tmp_path / "mine.keras").exists()
