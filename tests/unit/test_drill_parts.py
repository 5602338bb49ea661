"""A drill: when its faults strike, the damage they do, what it compares, and what it reports."""

from __future__ import annotations

import copy
import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from tfdist.checkpoint.manifest import (
    MANIFEST_NAME,
    DamagedCheckpointError,
    Manifest,
    checkpoint_name,
    drill_folder,
    encode_manifest,
    measure_file,
    verify_checkpoint,
)
from tfdist.launcher.drill.comparison import differences, tensor_name
from tfdist.launcher.drill.drill import (
    DIFFERS,
    FAILED,
    IDENTICAL,
    Outcome,
    recovery,
    show_table,
    was_tested,
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


@pytest.mark.parametrize(
    ("backup_dir", "expected"),
    [
        ("backup", "/drill/backup"),
        ("runs/7/backup/", "/drill/backup"),
        ("/home/me/.states", "/drill/.states"),
        ("gs://bucket/run/backup", "/drill/backup"),
    ],
)
def test_the_folder_in_a_drill(backup_dir: str, expected: str) -> None:
    assert drill_folder(backup_dir, {"TFDIST_DRILL_DIR": "/drill"}) == expected


@pytest.mark.parametrize("env", [{}, {"TFDIST_DRILL_DIR": ""}])
def test_no_drill(env: dict[str, str]) -> None:
    assert drill_folder("backup", env) is None


def saved(*moments: tuple[int, float]) -> list[dict]:
    return [{"event": "start", "time": 0.0}, *({"event": "saved", "step": s, "time": t} for s, t in moments)]


def test_the_rhythm_of_a_run() -> None:
    events = saved((10, 5.0), (20, 6.0), (30, 9.0), (40, 10.5), (40, 10.6))
    assert rhythm(events) == Rhythm(saves=3, steps=40, pause=1.5, longest_pause=3.0)


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


def encoded(loss: list[float]) -> dict:
    history = [["loss", {"list": [{"float": value.hex()} for value in loss]}]]
    return {"dict": [["history", {"dict": history}], ["epoch", {"list": [0, 1]}], ["range", {"tuple": [1, 2]}]]}


META = {
    "epoch": 2,
    "steps": 0,
    "total": 8,
    "done": True,
    "stopped": False,
    "random": [1, 2, 3],
    "callbacks": [
        {"class": "History", "compares": False, "state": encoded([0.5, 0.1])},
        {"class": "Mine", "compares": False, "state": {"dict": [["best", {"array": "callbacks/1/9", "scalar": True}]]}},
    ],
    "variables": {"model/0": ["dense/kernel", [2], "float32"]},
}


def changed(**fields) -> dict:
    return {**copy.deepcopy(META), **fields}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ([0.5, 0.2], ["History.history.loss[1]: 0.1 in the reference, 0.2 here"]),
        ([0.5, float("nan")], ["History.history.loss[1]: 0.1 in the reference, nan here"]),
        ([0.5], ["History.history.loss[1]: 0.1 in the reference, nothing here"]),
    ],
)
def test_the_history(loss: list[float], expected: list[str]) -> None:
    other = changed()
    other["callbacks"][0]["state"] = encoded(loss)
    assert differences(META, other) == expected


def test_all_kinds_of_state() -> None:
    def state(**changes: object) -> dict:
        keys = [[{"tuple": ["a", 1]}, {"set": [1, 2]}], [None, {"bytes": "eA=="}], [2, {"deque": [None, [3]]}]]
        parts = {"pairs": {"dict": keys}, "when": {"datetime": "2020-01-01T00:00:00"}, "number": {"variable": "v/0"}}
        parts["record"] = {"dataclass": ["m:Count", [["value", {"float": "0x1.8p+0"}]]]}
        return changed(callbacks=[{"class": "Own", "state": {"dict": [*({**parts, **changes}).items()]}}])

    assert differences(state(), state()) == []
    assert differences(state(), state(pairs={"dict": [[{"tuple": ["a", 1]}, {"set": [1, 3]}]]})) == [
        'Own.pairs.{"tuple": ["a", 1]}[1]: 2 in the reference, 3 here',
        "Own.pairs.None: 'eA==' in the reference, nothing here",
        "Own.pairs.2[0]: None in the reference, nothing here",
        "Own.pairs.2[1][0]: 3 in the reference, nothing here",
    ]
    assert differences(state(), state(record={"dataclass": ["m:Count", [["value", {"float": "0x1.0p+0"}]]]})) == [
        "Own.record[1][0][1]: 1.5 in the reference, 1.0 here"
    ]


def test_names_of_tensors() -> None:
    names = ("model/0", "replicas/model/0", "callbacks/1/9")
    assert [tensor_name(name, META) for name in names] == ["dense/kernel", "dense/kernel", "callbacks/1/9"]


def test_the_recovery_of_a_restarted_run() -> None:
    events = [
        {"event": "failure", "time": 5.0},  # not ours
        {"event": "saved", "time": 10.1, "step": 8},
        {"event": "failure", "time": 10.2},
        {"event": "resumed", "time": 12.0, "step": 8},
        {"event": "training-again", "time": 13.0, "steps_redone": 4},
        {"event": "failure", "time": 15.0},
        {"event": "training-again", "time": 18.0, "steps_redone": 1},
        {"event": "complete", "time": 20.0},
    ]
    assert recovery(events, 10.0) == {"detected": 0.2, "training_again": 3.0, "steps_redone": 5}


def test_the_recovery_of_a_preempted_run() -> None:
    events = [
        {"event": "preempted", "time": 10.5, "step": 40},
        {"event": "preempted", "time": 10.6, "step": 40},
        {"event": "preempted", "time": 12.0, "exit_code": 77},  # the launcher's
        {"event": "resumed", "time": 19.0, "step": 37},
        {"event": "complete", "time": 25.0},
    ]
    assert recovery(events, 10.0) == {"detected": 0.5, "training_again": 9.0, "steps_redone": 3}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([("failure", {}), ("training-again", {"steps_redone": 0}), ("complete", {})], True),
        ([("failure", {}), ("resumed", {"step": 80}), ("complete", {})], False),
        ([("complete", {})], False),
        ([("preempted", {"step": 79}), ("preempted", {"exit_code": 77}), ("complete", {})], True),
        # In the last epoch, which was finished first.
        ([("preempted", {"step": 80}), ("preempted", {"exit_code": 77}), ("resumed", {"step": 80})], False),
    ],
)
def test_whether_anything_was_left_to_train(events: list[tuple[str, dict]], expected: bool) -> None:
    earlier = {"event": "training-again", "time": 9.0, "steps_redone": 1}
    later = [{"event": kind, "time": 11.0 + i, **more} for i, (kind, more) in enumerate(events)]
    assert was_tested([earlier, *later], struck=10.0, steps=80) is expected


ROWS = [
    Outcome("kill-worker", "kill a worker", IDENTICAL, 0.123, 3.456, 12),
    Outcome("hang", "hang a worker", DIFFERS, 8.0, 12.0, 3, tuple(f"x[{i}]: 1, 2" for i in range(7))),
    Outcome("corrupt", "corrupt the newest backup", FAILED, details=("exit code 1; see [logs]",)),
]


def test_the_table() -> None:
    stream = io.StringIO()
    show_table(ROWS, Console(file=stream, width=80))
    lines = stream.getvalue().splitlines()
    assert [line.split() for line in lines if line.startswith(("  kill", "  hang", "  corrupt"))] == [
        ["kill", "a", "worker", "0.1", "s", "3.5", "s", "12", "identical"],
        ["hang", "a", "worker", "8.0", "s", "12.0", "s", "3", "differs"],
        ["corrupt", "the", "newest", "backup", "-", "-", "-", "failed"],
    ]
    assert [line.rstrip() for line in lines[-9:]] == [
        "hang: differs",
        *(f"  x[{i}]: 1, 2" for i in range(5)),
        "  and 2 more (--json shows all)",
        "corrupt: failed",
        "  exit code 1; see [logs]",
    ]
