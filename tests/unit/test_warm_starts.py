"""When a program is started from a zygote and when afresh; the zygote itself is a stand-in."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tfdist.launcher.guardian import Guardian
from tfdist.launcher.run_plan import ProcessPlan
from tfdist.launcher.warm import zygote as warm
from tfdist.launcher.warm.zygote import WarmStarts, Zygote, ZygoteError, start_afresh

CLOCK = SimpleNamespace(seconds=0.0)
COMMAND = (sys.executable, "-u", "-m", "this")


class FakeZygote:
    """Forks nothing."""

    made: list[FakeZygote]

    def __init__(self, command, env) -> None:
        self.state, self.fitting, self.error, self.closed, self.group = "importing", True, False, False, os.getpid()
        self.hurried = False
        self.made.append(self)

    def is_ready(self) -> bool:
        return self.state == "ready"

    def is_importing(self) -> bool:
        return self.state == "importing"

    def hurry(self) -> None:
        self.hurried = True

    def fits(self, command, env) -> bool:
        return self.fitting

    def spawn(self, env, cpus, output) -> str:
        if self.error:
            raise ZygoteError("gone")
        return f"forked for {env['NAME']}"

    def close(self) -> None:
        self.closed = True


class FakeGuardian(Guardian):
    """Guards nothing."""

    def __init__(self) -> None:
        self.groups: set[int] = set()

    def add(self, group: int) -> None:
        self.groups.add(group)

    def remove(self, group: int) -> None:
        self.groups.remove(group)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeZygote.made = []
    monkeypatch.setattr(warm, "Zygote", FakeZygote)
    monkeypatch.setattr(warm, "start_afresh", lambda plan, output: "afresh")
    CLOCK.seconds = 100.0
    monkeypatch.setattr(warm, "time", SimpleNamespace(monotonic=lambda: CLOCK.seconds))


def plan(command: tuple[str, ...] = COMMAND, name: str = "a") -> ProcessPlan:
    return ProcessPlan("worker", 0, command, {"NAME": name, "PATH": os.environ["PATH"]})


def trained(command: tuple[str, ...] = COMMAND, after: float = 6.0, enabled: bool = True) -> WarmStarts:
    """As things are when a program has begun to train."""
    starts = WarmStarts(FakeGuardian(), enabled)
    assert starts.start(plan(command), 1) == "afresh"
    train(starts, after, seconds=5.0)
    return starts


def train(starts: WarmStarts, after: float, seconds: float) -> None:
    """What the launcher does while the programs train."""
    end = CLOCK.seconds + seconds
    while CLOCK.seconds < end:
        starts.prepare(after)
        CLOCK.seconds += 0.5


def test_second_start_is_warm() -> None:
    starts = trained()
    (zygote,) = FakeZygote.made
    assert starts._guardian.groups == {zygote.group}
    zygote.state = "ready"
    assert starts.worth_waiting() == 0.0
    assert [starts.start(plan(name=name), 1) for name in "ab"] == ["forked for a", "forked for b"]
    starts.__exit__()
    assert zygote.closed
    assert not starts._guardian.groups


@pytest.mark.parametrize(
    ("what", "command", "after", "enabled"),
    [
        ("switched off", COMMAND, 6.0, False),
        ("no import that takes time", COMMAND, 0.5, True),
        ("not Python", ("sh", "-c", "train"), 6.0, True),
    ],
)
def test_no_zygote(what: str, command: tuple[str, ...], after: float, enabled: bool) -> None:
    starts = trained(command, after, enabled)
    starts.prepare(100.0)
    assert FakeZygote.made == []
    assert starts.worth_waiting() == 0.0


@pytest.mark.parametrize(("took", "expected"), [(6.0, 6.0), (60.0, 10.0)])
def test_waiting_for_imports_under_way(took: float, expected: float) -> None:
    starts = trained(after=took)
    assert starts.worth_waiting() == expected
    assert FakeZygote.made[0].hurried
    assert starts.start(plan(), 1) == "afresh"
    FakeZygote.made[0].state = "failed"
    assert starts.worth_waiting() == 0.0


def test_other_environment_is_started_afresh() -> None:
    starts = trained()
    FakeZygote.made[0].state, FakeZygote.made[0].fitting = "ready", False
    assert starts.start(plan(), 1) == "afresh"


def test_broken_zygote_is_replaced_later() -> None:
    starts = trained()
    (broken,) = FakeZygote.made
    broken.state, broken.error = "ready", True
    assert starts.start(plan(), 1) == "afresh"
    assert broken.closed
    assert not starts._guardian.groups
    train(starts, 6.0, seconds=5.0)
    assert len(FakeZygote.made) == 2


def test_first_steps_are_left_alone() -> None:
    starts = WarmStarts(FakeGuardian(), True)
    for _ in range(2):  # programs that are started again have first steps, too
        starts.start(plan(), 1)
        train(starts, 6.0, seconds=2.5)
        CLOCK.seconds += 60.0
    assert FakeZygote.made == []


def test_imports_that_get_no_time_end_their_deference() -> None:
    starts = trained()
    (zygote,) = FakeZygote.made
    train(starts, 6.0, seconds=50.0)
    assert not zygote.hurried
    train(starts, 6.0, seconds=20.0)
    assert zygote.hurried


@pytest.mark.parametrize("can_be_killed", [True, False], ids=["stopped", "waits for a disk"])
def test_a_worker_that_was_not_told_to_go_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_be_killed: bool
) -> None:
    connection, theirs = socket.socketpair()
    zygote = object.__new__(Zygote)
    zygote._connection = connection
    code = "import time; time.sleep(2); open('ended', 'w')"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path) as worker:

        def forks_what_hears_nothing() -> None:
            _, (control, output), _, _ = socket.recv_fds(theirs, 1, 2)
            os.close(output)
            with socket.socket(fileno=control) as answers:
                answers.recv(2**16)
                answers.shutdown(socket.SHUT_RD)
                answers.sendall(b"%d\n" % worker.pid)

        if not can_be_killed:
            monkeypatch.setattr(os, "kill", lambda pid, number: None)
            monkeypatch.setattr(warm, "_END_DEADLINE", 0.1)
        thread = threading.Thread(target=forks_what_hears_nothing, daemon=True)
        thread.start()
        try:
            with theirs, connection, pytest.raises(ZygoteError, match=r"could not fork a worker: .*Broken pipe"):
                zygote.spawn({}, (), 1)
            assert not (tmp_path / "ended").exists()
            assert psutil.pid_exists(worker.pid) != can_be_killed
        finally:
            thread.join(10)
            monkeypatch.undo()
            worker.kill()


def test_start_afresh() -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os; print(os.environ['NAME'], os.sched_getaffinity(0), os.getpgid(0) == os.getpid())"
    read_end, write_end = os.pipe()
    with open(read_end) as output:
        program = start_afresh(
            ProcessPlan("worker", 0, (sys.executable, "-c", code), {"NAME": "x"}, (core,)), write_end
        )
        os.close(write_end)
        assert output.read() == f"x {{{core}}} True\n"
    assert isinstance(program, subprocess.Popen)
    assert program.wait() == 0
