from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tfdist.launcher.drill.outcome import (
    DIFFERS,
    FAILED,
    IDENTICAL,
    Outcome,
    Recovery,
    recovery,
    show_table,
    to_json,
    was_tested,
)


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
    assert recovery(events, 10.0) == Recovery(0.2, 3.0, 5)


def test_the_recovery_of_a_preempted_run() -> None:
    events = [
        {"event": "preempted", "time": 10.5, "step": 40},
        {"event": "preempted", "time": 10.6, "step": 40},
        {"event": "preempted", "time": 12.0, "exit_code": 77},  # the launcher's
        {"event": "resumed", "time": 19.0, "step": 37},
        {"event": "complete", "time": 25.0},
    ]
    assert recovery(events, 10.0) == Recovery(0.5, 9.0, 3)


def test_a_fault_that_nobody_noticed() -> None:
    assert recovery([{"event": "complete", "time": 20.0}], 10.0) == Recovery(None, None, None)


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
    Outcome("kill-worker", "kill a worker", IDENTICAL, Recovery(0.123, 3.456, 12)),
    Outcome("hang", "hang a worker", DIFFERS, Recovery(8.0, 12.0, 3), tuple(f"x[{i}]: 1, 2" for i in range(7))),
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


def test_json() -> None:
    result = json.loads(to_json(ROWS))
    assert result["identical"] is False
    assert result["rows"][0] == {
        "fault": "kill-worker",
        "title": "kill a worker",
        "result": "identical",
        "detected": 0.123,
        "training_again": 3.456,
        "steps_redone": 12,
        "details": [],
    }
    assert len(result["rows"][1]["details"]) == 7
    assert json.loads(to_json(ROWS[:1]))["identical"] is True
