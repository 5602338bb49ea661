"""When the faults of a drill strike, and the damage that they do to checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfdist.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedCheckpointError,
    Manifest,
    checkpoint_name,
    encode_manifest,
    measure_file,
    verify_checkpoint,
)
from tfdist.launcher.drill.faults import (
    FAULTS,
    FEWEST_SAVES,
    Rhythm,
    backup_folders,
    flip_bit,
    newest_checkpoint,
    rhythm,
    truncate,
)
from tfdist.supervision.events import EventStream


def saved(*moments: tuple[int, float]) -> list[dict]:
    return [{"event": "start", "time": 0.0}, *({"event": "saved", "step": s, "time": t} for s, t in moments)]


def test_the_rhythm_of_a_run() -> None:
    events = saved((10, 5.0), (20, 6.0), (30, 9.0), (40, 10.5), (40, 10.6))
    assert rhythm(events) == Rhythm(saves=3, steps=40, pause=1.5, longest_pause=3.0)


def test_a_run_that_only_saves_at_its_end() -> None:
    assert rhythm(saved((40, 10.0), (40, 10.1))) == Rhythm(saves=0, steps=40, pause=0.0, longest_pause=0.0)
    assert rhythm(saved()) == Rhythm(saves=0, steps=0, pause=0.0, longest_pause=0.0)


@pytest.mark.parametrize(
    ("saves", "before", "left", "expected"),
    [(10, 1, 1, 4), (11, 1, 1, 5), (3, 1, 1, 2), (3, 2, 1, 2), (3, 1, 2, 1), (4, 1, 2, 2), (100, 1, 2, 40)],
)
def test_the_backup_after_which_to_strike(saves: int, before: int, left: int, expected: int) -> None:
    assert Rhythm(saves, 100, 1.0, 1.0).strike_after(before, left) == expected


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_fits_into_the_shortest_run_that_is_allowed(fault) -> None:
    after = Rhythm(FEWEST_SAVES, 100, 1.0, 1.0).strike_after(fault.saves_before, fault.saves_left)
    assert fault.saves_before <= after <= FEWEST_SAVES - fault.saves_left


@pytest.mark.parametrize(("longest", "expected"), [(0.1, 8.0), (4.0, 12.0), (11.0, None)])
def test_the_hang_timeout(longest: float, expected: float | None) -> None:
    assert Rhythm(5, 100, 0.1, longest).hang_timeout == expected


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
    with pytest.raises(DamagedCheckpointError) as caught:
        verify_checkpoint(str(checkpoint))
    assert caught.value.reason.startswith(reason)


def test_events_are_read_as_they_come(tmp_path: Path) -> None:
    stream = EventStream(tmp_path)
    assert stream.read() == []
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"time": 1.0, "name": "chief", "event": "start"}\n{"time": 1.0, "name": "chief", "event": "sav')
        file.flush()
        assert stream.read() == [{"time": 1.0, "name": "chief", "event": "start"}]
        assert stream.read() == []
        file.write('ed"}\n')
    assert stream.read() == [{"time": 1.0, "name": "chief", "event": "saved"}]
    assert stream.events == [
        {"time": 1.0, "name": "chief", "event": "start"},
        {"time": 1.0, "name": "chief", "event": "saved"},
    ]
