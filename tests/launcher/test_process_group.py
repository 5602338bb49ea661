"""What the kernel does with process groups, pipes and logs, as the launcher's processes use them: with shells."""

from __future__ import annotations

import io
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.conftest import DEADLINE, wait_until
from tfdist.launcher import process
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import spawn
from tfdist.launcher.output import Terminal
from tfdist.launcher.plan import ProcessPlan
from tfdist.launcher.policy import Failure
from tfdist.launcher.process import ProcessGroup, start_unpinned


class Trial:
    """A process group that has come to its end.

    Attributes:
        shown: what it printed, as the launcher shows it.
        failures: what became of each process that did not end with 0.
    """

    def __init__(self, folder: Path, *scripts: str, restart: int = 0) -> None:
        stream, end = io.BytesIO(), time.monotonic() + DEADLINE
        plans = [
            ProcessPlan("worker", index, ("/bin/sh", "-c", script), os.environ, shown=index == 0)
            for index, script in enumerate(scripts)
        ]
        self.failures: list[Failure] = []
        terminal = Terminal(stream, is_tty=False, live="worker 0")
        with Guardian() as guardian, ProcessGroup(plans, folder, terminal, guardian, restart, start_unpinned) as group:
            while not group.is_over:
                for ended in group.tick():
                    assert ended.status is not None
                    if ended.status:
                        self.failures.append(group.failure(ended, ended.status))
                assert time.monotonic() < end
        self.shown = stream.getvalue().decode()


@pytest.fixture
def trial(tmp_path: Path) -> Callable[..., Trial]:
    return lambda *scripts, folder=tmp_path, **more: Trial(folder, *scripts, **more)


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_HELPERS_GRACE", 0.1)


def test_exit_codes_signals_and_last_words(trial) -> None:
    done = trial("printf 'last words'; exit 9", "kill -SEGV $$", "kill -KILL $$", "exit 0")
    failures = {one.name: one for one in done.failures}
    assert {name: one.status for name, one in failures.items()} == {"worker 0": 9, "worker 1": -11, "worker 2": -9}
    assert (failures["worker 0"].tail, failures["worker 1"].tail) == (("last words",), ())
    assert done.shown == "[worker 0] last words\n"


def test_great_amount_of_output_is_complete(trial, tmp_path: Path) -> None:
    done = trial("seq -f 'line %.0f' 20000", "seq -f 'line %.0f' 20000")
    expected = [f"line {number}" for number in range(1, 20001)]
    assert done.shown.splitlines() == [f"[worker 0] {line}" for line in expected]
    assert [(tmp_path / f"worker-{index}.log").read_text().splitlines() for index in (0, 1)] == [expected] * 2


def test_logs_are_continued_and_the_last_life_alone_is_told(trial, tmp_path: Path) -> None:
    for restart in range(3):
        done = trial("exit 0", f"printf 'life {restart}'; exit 3", restart=restart)
        assert done.failures[0].tail == (f"life {restart}",)
    assert (tmp_path / "worker-1.log").read_text() == "life 0\n--- restart 1 ---\nlife 1\n--- restart 2 ---\nlife 2"
    assert (tmp_path / "worker-0.log").read_text() == "--- restart 1 ---\n--- restart 2 ---\n"


def test_logs_that_the_program_has_deleted_are_told_and_made_anew(trial, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    done = trial(f"rm -r {logs}; echo 'no logs any more'; exit 3", folder=logs)
    assert done.failures[0].tail == ("no logs any more",)
    trial("exit 0", folder=logs, restart=1)
    assert (logs / "worker-0.log").read_text() == "--- restart 1 ---\n"


def test_helpers_may_clean_up(trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_HELPERS_GRACE", DEADLINE)
    trial(f"(sleep 0.2; touch {tmp_path}/clean) & exit 0")
    assert (tmp_path / "clean").exists()


def test_helpers_that_remain_are_killed(trial, tmp_path: Path, short_grace: None) -> None:
    done = trial(f"sleep 1000 & echo $! > {tmp_path}/helper; exit 3")
    assert [one.status for one in done.failures] == [3]
    helper = int((tmp_path / "helper").read_text())
    wait_until(lambda: process.process_state(helper) in process._ENDED, DEADLINE, "the end of the helper")


@pytest.mark.skipif(shutil.which("setsid") is None, reason="setsid is not installed")
@pytest.mark.parametrize(
    "helper",
    ["for i in $(seq 30000); do [ -e hold ] || exit; sleep 0.02; done", f"exec yes {'x' * 1000}"],
    ids=["silent", "talkative"],
)
@pytest.mark.parametrize("leaves", ["", "setsid"], ids=["in the group", "left the group"])
def test_helpers_that_hold_the_output_do_not_keep_the_launcher(
    trial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_grace: None, leaves: str, helper: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hold").touch()
    helper = f"{leaves} sh -c 'touch up; {helper}' &"
    done = trial(f"printf 'the end'; {helper} while ! [ -e up ]; do sleep 0.01; done; exit 3")
    (tmp_path / "hold").unlink()  # who left the group is nobody's to kill, and ends by itself
    assert [one.status for one in done.failures] == [3]
    assert done.shown.startswith("[worker 0] the end")


@pytest.mark.parametrize("who", ["the process", "its helper"])
def test_what_the_kernel_does_not_end_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_grace: None, capfd: pytest.CaptureFixture[str], who: str
) -> None:
    """As a process that waits for a network file system: the signal is sent, and nothing happens."""
    monkeypatch.setattr(process, "_KILL_SECONDS", 0.5)
    monkeypatch.setattr(process.Process, "signal", lambda self, number: None)
    groups: list[int] = []
    monkeypatch.setattr(process, "spawn", lambda *words, **more: _noted(groups, spawn(*words, **more)))
    terminal = Terminal(io.BytesIO(), is_tty=False, live="worker 0")
    script = "exec sleep 1000" if who == "the process" else "sleep 1000 & exit 3"
    plans = [ProcessPlan("worker", 0, ("/bin/sh", "-c", script), os.environ, shown=True)]
    end = time.monotonic() + DEADLINE
    try:
        with Guardian() as guardian, ProcessGroup(plans, tmp_path, terminal, guardian, 0, start_unpinned) as group:
            ended = []
            if who == "the process":
                group.kill()
            while not group.is_over:
                ended += group.tick()
                assert time.monotonic() < end
            assert [one.status for one in ended] == [-signal.SIGKILL if who == "the process" else 3]
    finally:
        for number in groups:
            os.killpg(number, signal.SIGKILL)
    shown = capfd.readouterr().err
    assert "has not ended 0.5 s after SIGKILL, and is left behind" in shown and "tfdist: worker 0: process " in shown
    if who == "the process":
        os.waitpid(groups[0], 0)


def _noted(groups: list[int], started):
    groups.append(started.pid)
    return started


WAIT_FOR_SIGTERM = """
import pathlib, signal, subprocess, sys
helper = subprocess.Popen(["sleep", "1000"])
def stop(*_):
    try:
        sys.exit(-helper.wait(float(sys.argv[2])))
    except subprocess.TimeoutExpired:
        sys.exit(0)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).touch()
signal.pause()
"""


@pytest.mark.parametrize(
    ("wrapper", "patience", "helper_gets"), [((), 0.2, 0), (("/usr/bin/env",), DEADLINE, signal.SIGTERM)]
)
def test_sigterm_goes_to_a_python_program_alone(
    tmp_path: Path, wrapper: tuple[str, ...], patience: float, helper_gets: int
) -> None:
    arguments = (str(tmp_path / "ready"), str(patience))
    command = (*wrapper, sys.executable, "-I", "-S", "-c", WAIT_FOR_SIGTERM, *arguments)
    one = process.Process(ProcessPlan("worker", 0, command, os.environ), tmp_path, start_program=start_unpinned)
    one.start()
    try:
        wait_until((tmp_path / "ready").exists, DEADLINE, "its handler")
        one.signal(signal.SIGTERM)
        wait_until(one.poll, DEADLINE, "its end")
        assert one.status == helper_gets
    finally:
        one.kill()
        wait_until(lambda: one.poll() or one.is_over, DEADLINE, "the end of the group")
        one.close()


def test_what_could_not_be_started_gets_no_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its group is 0: that of the launcher."""
    sent: list[int] = []
    terminal = Terminal(io.BytesIO(), is_tty=False)
    with Guardian() as guardian, ProcessGroup([], tmp_path, terminal, guardian, 0, start_unpinned) as group:
        with pytest.raises(FileNotFoundError):
            group.add(ProcessPlan("worker", 0, ("/no/such/program",), os.environ))
        with monkeypatch.context() as patch:
            for name in ("kill", "killpg"):
                patch.setattr(os, name, lambda pid, number: sent.append(pid))
            group.signal(signal.SIGTERM)
            group.processes[0].kill()
        assert (group.running, group.is_over, sent) == ([], True, [])


def test_processes_that_are_replaced_leave_no_descriptors(tmp_path: Path) -> None:
    """A search may replace a tuner a thousand times."""
    plan = ProcessPlan("worker", 0, ("/bin/true",), os.environ)
    terminal = Terminal(io.BytesIO(), is_tty=False)
    with Guardian() as guardian, ProcessGroup([plan], tmp_path, terminal, guardian, 0, start_unpinned) as group:
        counts = []
        for number in range(1, 6):
            wait_until(lambda: group.tick() == [] and group.is_over, DEADLINE, "the end of the process")
            counts.append(len(os.listdir("/proc/self/fd")))
            group.replace(group.processes[0], number)
        wait_until(lambda: group.tick() == [] and group.is_over, DEADLINE, "the end of the process")
    assert len(set(counts)) == 1
