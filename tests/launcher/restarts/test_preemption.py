"""Runs that are asked to stop, from inside or by a signal to the launcher: they are not restarted."""

from __future__ import annotations

import signal
import time

import pytest

from tests.launcher.conftest import wait_until
from tests.launcher.training import events, of_kind, program


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(77)",
        "time.sleep(index); sys.exit(77)",
        "sys.exit(77 if index else 0)",
        "time.sleep(1 - index)\n    if index: sys.exit(77)\n    print('UnavailableError: gone'); sys.exit(1)",
        "sys.exit(77) if index else wait()",
    ],
    ids=["together", "one after the other", "the other is complete", "the other misses it", "the other hangs"],
)
def test_a_preempted_run_is_not_restarted(launch, tmp_path, end: str) -> None:
    started = launch(program(f"train(10)\n    {end}"), "--grace", "2")
    result = started.finish()
    assert result.code == 77
    assert "restart" not in result.err
    assert [event["event"] for event in events(tmp_path)] == ["start", "preempted"]
    started.assert_nothing_is_left()


def test_sigterm_to_a_run_that_saves(launch, tmp_path) -> None:
    script = """
        if job == "worker": signal.signal(signal.SIGTERM, lambda *_: sys.exit(77))
        Path(name).touch()
        if job == "worker": train(10000)
        wait()
    """
    started = launch(program(script), "--evaluator", "-n", "2")
    started.wait_for_file("worker-0", "worker-1", "evaluator-0")
    started.popen.send_signal(signal.SIGTERM)
    assert started.finish().code == 77
    assert [event["event"] for event in events(tmp_path)] == ["start", "preempted"]


def test_a_signal_ends_the_run_whatever_the_processes_do(launch, tmp_path) -> None:
    started = launch(program("Path(name).touch()\n    train(10000)"))
    started.wait_for_file("worker-0", "worker-1")
    started.popen.send_signal(signal.SIGTERM)
    assert started.finish().code == 143
    assert [event["event"] for event in events(tmp_path)] == ["start", "interrupted"]


def test_a_signal_while_a_restart_is_waited_for(launch, tmp_path) -> None:
    script = "writer.begin()\n    writer.resumed(10 * restart)\n    if index == 1: kill()\n    wait()"
    started = launch(program(script), "--max-restarts", "9")
    wait_until(lambda: bool(list(tmp_path.glob("tfdist-logs/*/events.jsonl"))), 10, "the event log")
    wait_until(lambda: len(of_kind(tmp_path, "restart")) == 2, 10, "the second restart")
    assert of_kind(tmp_path, "restart")[1]["delay"] == 2.0
    start = time.monotonic()
    started.popen.send_signal(signal.SIGTERM)
    result = started.finish(5)
    assert result.code == 143
    assert time.monotonic() - start < 1.5
    assert "tfdist: SIGTERM received: not restarted\n" in result.err
    started.assert_nothing_is_left()
