"""The program of docs/logging.md on two processes, offline: one run of each logger, with the numbers of the history."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.pages import blocks_of

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(240)]

_EPILOGUE = """
import json
with open(f"history-{int(strategy.is_chief)}.json", "w") as file:
    json.dump(history.history, file)
"""
_BLOCK_BYTES, _FIRST_BYTES, _HEADER_BYTES = 32768, 7, 7
_WHOLE, _LAST = 1, 4


def records(path: Path) -> Iterator[bytes]:
    """What Weights & Biases has written: the records of a log in LevelDB's format, some of them in parts."""
    data, place, record = path.read_bytes(), _FIRST_BYTES, b""
    while place < len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEADER_BYTES:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        place += _HEADER_BYTES
        record += data[place : place + size]
        place += size
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


def rows_of_wandb(path: Path) -> list[dict[str, Any]]:
    from wandb.proto import wandb_internal_pb2

    found = [wandb_internal_pb2.Record.FromString(record) for record in records(path)]
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]


def test_one_run_is_logged(warm_launch, tmp_path):
    pytest.importorskip("wandb")
    pytest.importorskip("mlflow.keras")
    program = "\n".join(block.text for block in blocks_of("docs/logging.md", "python"))
    offline = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": "file:mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}
    launch = warm_launch(program + _EPILOGUE, "-n", "2", env=offline)
    result = launch.finish(180)
    assert result.code == 0, result.err
    history = json.loads((tmp_path / "history-1.json").read_text())
    assert history == json.loads((tmp_path / "history-0.json").read_text())
    assert len(history["val_loss"]) == 3
    assert "loss " in result.out and "loss " not in launch.log("worker-1").rpartition("val_mae")[2]

    (run,) = tmp_path.glob("wandb/*run-*/run-*.wandb")
    rows = rows_of_wandb(run)
    assert {name: [row[f"epoch/{name}"] for row in rows] for name in history} == history
    assert [row["epoch/epoch"] for row in rows] == [0, 1, 2]

    (metrics,) = tmp_path.glob("mlruns/0/*/metrics")
    for name, values in history.items():
        lines = [line.split() for line in (metrics / name).read_text().splitlines()]
        assert {int(step): float(value) for _, value, step in lines} == dict(enumerate(values))
    (status,) = tmp_path.glob("mlruns/0/*/meta.yaml")
    assert "\nstatus: 3\n" in f"\n{status.read_text()}", "finished"
