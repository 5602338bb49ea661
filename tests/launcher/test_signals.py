"""Signals to the launcher, and its violent death. What signals lead to, without processes, is in policy/."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import DEADLINE, Launch

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


@pytest.mark.parametrize("code", [0, 3])
def test_a_launcher_that_was_started_with_sigchld_ignored(launches, tmp_path: Path, code: int) -> None:
    """As some services do, to have no zombies: the kernel would forget how processes end."""
    # The one that fails first would end the other, which may have said nothing yet.
    both = f"touch {tmp_path}/$$.done; until [ $(ls {tmp_path}/*.done | wc -l) = 2 ]; do sleep 0.05; done"
    words = [sys.executable, "-m", "tfdist", "run", "-n", "2", "--", "sh", "-c", f"echo done; {both}; exit {code}"]
    ignoring = (
        "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    )
    launches.append(started := Launch(tmp_path, [sys.executable, "-c", ignoring, *words]))
    result = started.finish()
    assert (result.code, result.out) == (code, "[worker 0] done\n"), result.err
    assert started.log("worker-1") == "done\n"
    started.assert_nothing_is_left()
