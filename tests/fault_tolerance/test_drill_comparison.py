"""Whether the last backups of two runs are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from tfdist.checkpoint.store import CheckpointStore
from tfdist.launcher.drill.comparison import compare

TIMEOUT = 120.0


def write(root: Path, loss: float = 0.5, fit: str = "backup", **tensors: Any) -> None:
    """Two checkpoints, the first of which is the same in no two runs."""
    state = {"dict": [["loss", {"list": [{"float": loss.hex()}]}]]}
    meta = {
        **{"epoch": 2, "steps": 0, "total": 8, "done": True, "stopped": False},
        "variables": {"model/0": ["dense/kernel", [2, 2], "float32"], "model/1": ["dense/bias", [3], "bfloat16"]},
        "callbacks": [{"class": "History", "compares": False, "state": state}],
    }
    values = {
        "model/0": tf.constant([[1.0, float("nan")], [0.0, 4.0]]),
        "model/1": tf.constant([1, 2, 3], tf.bfloat16),
        "iterator": tf.constant([b"one", b"two"]),
        **tensors,
    }
    store = CheckpointStore(root / fit)
    store.write({**meta, "total": id(root)}, {"model/0": tf.random.normal([2, 2])})
    store.write(meta, {name: value for name, value in values.items() if value is not None})


def test_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for root in ("one", "other"):
        write(tmp_path / root)
        write(tmp_path / root, fit="backup/fit-2")
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("no process is needed for equal files"))
    assert compare(tmp_path / "one", tmp_path / "other", TIMEOUT) == []


@pytest.mark.nightly
def test_differences_are_named_and_measured(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(
        tmp_path / "other",
        loss=0.25,
        **{
            "model/0": tf.constant([[1.0, float("nan")], [-0.0, 4.25]]),
            "model/1": tf.constant([1, 2], tf.bfloat16),
            "iterator": tf.constant([b"one", b"three"]),
            "model/2": tf.constant(1),
        },
    )
    assert compare(tmp_path / "one", tmp_path / "other", TIMEOUT) == [
        "History.loss[0]: 0.5 in the reference, 0.25 here",
        "iterator: 1 of 2 texts differ",
        "dense/kernel: 2 of 4 values differ, by 0.25 at most",
        "dense/bias: bfloat16[3] in the reference, bfloat16[2] here",
        "model/2: only in the disturbed run",
    ]


def test_a_fit_that_is_missing(tmp_path: Path) -> None:
    write(tmp_path / "one")
    write(tmp_path / "one", fit="backup/fit-2")
    write(tmp_path / "other")
    assert compare(tmp_path / "one", tmp_path / "other", TIMEOUT) == [
        "fits with backups: ['backup', 'backup/fit-2'] in the reference, ['backup'] here"
    ]


def test_a_damaged_last_backup(tmp_path: Path) -> None:
    for root in ("one", "other"):
        write(tmp_path / root)
    (tmp_path / "other/backup/checkpoint-00000002/state.index").write_bytes(b"")
    (line,) = compare(tmp_path / "one", tmp_path / "other", TIMEOUT)
    assert "checkpoint-00000002 is damaged: state.index has 0 bytes instead of " in line
