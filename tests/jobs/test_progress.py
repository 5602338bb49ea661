"""How far a training is: the lines of the chief, and what is made of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tfdist.jobs import status
from tfdist.jobs.status import Progress, last_progress
from tfdist.supervision.events import events_in, last_events, without_event

NOW = 1_764_000_000.0


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time passes."""
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: NOW))


def line(age: float = 0, **fields: Any) -> str:
    return json.dumps({"time": NOW - age, "name": "chief", "event": "progress", "epoch": 3, "step": 20, **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "epoch 3, step 20"),
        ({"epochs": 10, "steps": 40, "loss": 0.12345}, "epoch 3/10, step 20/40, loss 0.1235"),
        ({"epochs": 10, "steps": 40, "seconds_left": 240.0}, "epoch 3/10, step 20/40, about 4 min left"),
        ({"epochs": 3, "steps": 20, "seconds_left": 0.0}, "epoch 3/3, step 20/20"),
        ({"age": 100, "loss": 1.0}, "epoch 3, step 20, loss 1 (2 min ago)"),
    ],
)
def test_a_line_in_words(fields: dict[str, Any], text: str) -> None:
    progress = last_progress(events_in(line(**fields)))
    assert progress is not None
    assert progress.shown() == text


def test_time_that_has_passed_since_is_not_left() -> None:
    progress = Progress(NOW - 25, 1, 0, epochs=1, steps=100, seconds_left=100.0)
    assert progress.shown() == "epoch 1/1, step 0/100, about 75 s left"
    assert progress.shown(is_running=False) == "epoch 1/1, step 0/100"


def test_the_last_one_counts_whatever_is_around_it() -> None:
    lines = [
        line(step=1),
        "25/25 ━━━ loss: 0.3" + line(step=2),
        line(step=3)[:40],
        '{"time": 1, "event": "saved"}',
        "",
        "{",
    ]
    progress = last_progress(events_in("\n".join(lines)))
    assert progress is not None and progress.step == 2
    assert last_progress(events_in('Epoch 1/3\n{"time": 1, "event": "progress"}')) is None


def test_only_the_end_of_a_long_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{line(step=step)}\n" for step in range(20000)))
    events = last_events(path)
    assert 100 < len(events) < 1000
    progress = last_progress(events)
    assert progress is not None and progress.step == 19999
    assert last_events(tmp_path / "nothing") == []


def test_events_are_left_out_of_what_people_read() -> None:
    event = line().encode()
    lines = [b"Epoch 1/3", b"3/25 - loss: 0.3" + event, event, b'{"time": 3}', b'{"time": 3']
    assert b"".join(map(without_event, lines)) == b'Epoch 1/3\n3/25 - loss: 0.3{"time": 3}\n{"time": 3\n'
