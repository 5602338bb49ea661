"""Signals to the launcher, and its violent death. What signals lead to, without processes, is in policy/."""

from __future__ import annotations

import os
import signal

from tests.launcher.conftest import DEADLINE

READY_THEN_SLEEP = "Path(name).touch(); time.sleep(1000)"


def test_ctrl_c_becomes_keyboard_interrupt(launch) -> None:
    started = launch(READY_THEN_SLEEP)
    started.wait_for_file("worker-0", "worker-1")
    started.popen.send_signal(signal.SIGINT)
    result = started.finish()
    assert result.code == 130
    assert "tfdist: SIGINT received and passed on to 2 processes (SIGKILL in 30 s" in result.err
    assert "[worker 0] KeyboardInterrupt\n" in result.out
    assert started.log("worker-1").endswith("KeyboardInterrupt\n")
    started.assert_nothing_is_left()


def test_nothing_outlives_a_killed_launcher(launch) -> None:
    script = """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        Path(name).touch()
        time.sleep(1000)
    """
    started = launch(script, "-n", "3")
    started.wait_for_file("worker-0", "worker-1", "worker-2")
    assert len(started.marked()) == 1 + 1 + 3 * 2  # launcher, guardian, workers with a child each
    os.kill(started.popen.pid, signal.SIGKILL)
    started.popen.wait(DEADLINE)
    started.assert_nothing_is_left()


def test_helpers_that_have_left_their_group_do_not_outlive_a_killed_launcher(launch) -> None:
    script = """
        code = "import signal, sys, time; from pathlib import Path; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        code += "Path(sys.argv[1]).touch(); time.sleep(1000)"
        subprocess.Popen([sys.executable, "-c", code, sys.argv[1] + name], start_new_session=True)
        time.sleep(1000)
    """
    started, other = launch(script, "-n", "2", arguments=["a-"]), launch(script, "-n", "1", arguments=["b-"])
    started.wait_for_file("a-worker-0", "a-worker-1", "b-worker-0")
    os.kill(started.popen.pid, signal.SIGKILL)
    started.popen.wait(DEADLINE)
    started.assert_nothing_is_left()
    assert len(other.marked()) == 4  # another run's launcher, guardian, worker and helper


def test_signals_to_the_whole_group_spare_the_guardian(launch) -> None:
    started = launch(READY_THEN_SLEEP)
    started.wait_for_file("worker-0", "worker-1")
    os.killpg(started.popen.pid, signal.SIGKILL)
    started.popen.wait(DEADLINE)
    started.assert_nothing_is_left()
