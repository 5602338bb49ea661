"""Signals to the launcher, and its violent death."""

from __future__ import annotations

import os
import signal
import time

import pytest

READY_THEN_SLEEP = "Path(name).touch(); time.sleep(60)"
SAVE_ON_SIGNAL = """
    def save(number, frame):
        Path(f"saved-{name}-{number}").touch()
        sys.exit(CODE)
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, save)
    Path(name).touch()
    time.sleep(60)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_ends_the_run(launch, number: signal.Signals, code: int) -> None:
    started = launch(READY_THEN_SLEEP)
    started.wait_for_file("worker-0", "worker-1")
    started.popen.send_signal(number)
    result = started.finish(8)
    assert result.code == code
    assert f"tfdist: {number.name} received and passed on to 2 processes (SIGKILL in 10 s" in result.err
    started.assert_nothing_is_left()


def test_ctrl_c_becomes_keyboard_interrupt(launch) -> None:
    started = launch(READY_THEN_SLEEP)
    started.wait_for_file("worker-0", "worker-1")
    started.popen.send_signal(signal.SIGINT)
    result = started.finish(8)
    assert "[worker 0] KeyboardInterrupt\n" in result.out
    assert started.log("worker-1").endswith("KeyboardInterrupt\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_common_exit_code_is_returned(launch, tmp_path, number: signal.Signals) -> None:
    started = launch(SAVE_ON_SIGNAL.replace("CODE", "77"))
    started.wait_for_file("worker-0", "worker-1")
    started.popen.send_signal(number)
    assert started.finish(8).code == 77
    assert {path.name for path in tmp_path.glob("saved-*")} == {f"saved-worker-{i}-{int(number)}" for i in (0, 1)}


def test_different_exit_codes_give_that_of_the_signal(launch) -> None:
    started = launch(SAVE_ON_SIGNAL.replace("CODE", "70 + index"))
    started.wait_for_file("worker-0", "worker-1")
    started.popen.send_signal(signal.SIGTERM)
    assert started.finish(8).code == 143


STUBBORN = """
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
    Path(name).touch()
    time.sleep(60)
"""


def test_grace_ends_with_sigkill(launch) -> None:
    started = launch(STUBBORN, "--grace", "1")
    started.wait_for_file("worker-0", "worker-1")
    start = time.monotonic()
    started.popen.send_signal(signal.SIGTERM)
    assert started.finish(8).code == 143
    assert 1.0 <= time.monotonic() - start < 3.0
    started.assert_nothing_is_left()


def test_second_ctrl_c_kills_at_once(launch) -> None:
    started = launch(STUBBORN, "--grace", "60")
    started.wait_for_file("worker-0", "worker-1")
    started.popen.send_signal(signal.SIGINT)
    time.sleep(0.6)
    assert started.popen.poll() is None
    started.popen.send_signal(signal.SIGINT)
    start = time.monotonic()
    result = started.finish(8)
    assert result.code == 130
    assert "press Ctrl-C again to kill them now" in result.err
    assert time.monotonic() - start < 2.0


def test_doubled_key_press_counts_once(launch) -> None:
    started = launch(SAVE_ON_SIGNAL.replace("sys.exit(CODE)", "time.sleep(0.5); sys.exit(77)"))
    started.wait_for_file("worker-0", "worker-1")
    started.popen.send_signal(signal.SIGINT)
    time.sleep(0.1)
    started.popen.send_signal(signal.SIGINT)
    assert started.finish(8).code == 77


def test_nothing_outlives_a_killed_launcher(launch) -> None:
    script = """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        Path(name).touch()
        time.sleep(60)
    """
    started = launch(script, "-n", "3")
    started.wait_for_file("worker-0", "worker-1", "worker-2")
    assert len(started.marked()) == 1 + 1 + 3 * 2  # launcher, guardian, workers with a child each
    os.kill(started.popen.pid, signal.SIGKILL)
    started.popen.wait(5)
    started.assert_nothing_is_left(within=2.0)


def test_signals_to_the_whole_group_spare_the_guardian(launch) -> None:
    started = launch(READY_THEN_SLEEP)
    started.wait_for_file("worker-0", "worker-1")
    os.killpg(started.popen.pid, signal.SIGKILL)
    started.popen.wait(5)
    started.assert_nothing_is_left(within=2.0)
