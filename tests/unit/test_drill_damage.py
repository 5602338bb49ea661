from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfdist.callbacks.checkpoint_name import checkpoint_name
from tfdist.callbacks.damage import DamagedCheckpoint
from tfdist.callbacks.manifest import MANIFEST_NAME, Manifest, encode_manifest, measure_file, verify_checkpoint
from tfdist.launch.drill.checkpoint_damage import backup_folders, flip_bit, newest_checkpoint, truncate
from tfdist.supervision.event_stream import EventStream


def write(folder: Path, number: int, time: int) -> Path:
    checkpoint = folder / checkpoint_name(number)
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.data").write_bytes(bytes(range(100)))
    (checkpoint / "state.index").write_bytes(b"index")
    files = {name: measure_file(str(checkpoint / name)) for name in ("state.data", "state.index")}
    (checkpoint / MANIFEST_NAME).write_bytes(encode_manifest(Manifest({"random": list(range(999))}, files, {})))
    os.utime(checkpoint / MANIFEST_NAME, (time, time))
    return checkpoint


def test_the_newest_checkpoint_of_all_fits(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    write(tmp_path / "backup", 8, time=100)
    write(tmp_path / "backup", 9, time=110)
    second = write(tmp_path / "backup" / "fit-2", 1, time=120)
    (tmp_path / "backup" / "fit-2" / checkpoint_name(2)).mkdir()  # being written
    (tmp_path / "other").mkdir()
    assert newest_checkpoint(tmp_path) == second
    assert backup_folders(tmp_path) == [tmp_path / "backup", tmp_path / "backup" / "fit-2"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(flip_bit, "state.data has the checksum "), (truncate, "state.data has 50 bytes instead of 100")],
)
def test_damages_are_noticed(tmp_path: Path, damage, reason: str) -> None:
    checkpoint = write(tmp_path, 1, time=100)
    verify_checkpoint(str(checkpoint))
    damage(checkpoint)
    with pytest.raises(DamagedCheckpoint) as caught:
        verify_checkpoint(str(checkpoint))
    assert caught.value.reason.startswith(reason)


def test_events_are_read_as_they_come(tmp_path: Path) -> None:
    stream = EventStream(tmp_path)
    assert stream.read() == []
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "start"}\n{"event": "sav')
        file.flush()
        assert stream.read() == [{"event": "start"}]
        assert stream.read() == []
        file.write('ed"}\n')
    assert stream.read() == [{"event": "saved"}]
    assert stream.events == [{"event": "start"}, {"event": "saved"}]
