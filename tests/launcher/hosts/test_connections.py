"""Hosts that fall silent, and launchers that do: what each side does about it."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.launcher.conftest import wait_until
from tfdist import __version__
from tfdist.launcher.hosts import connection as connections
from tfdist.launcher.hosts.agent import SILENCE
from tfdist.launcher.hosts.connection import Channel, Connection, HostsError, Reach, Reached, check_said, line
from tfdist.launcher.hosts.group import HostsGroup
from tfdist.launcher.hosts.places import ListedHost
from tfdist.launcher.output import Terminal
from tfdist.launcher.plan import ProcessPlan
from tfdist.launcher.policy import choose
from tfdist.supervision.exit_codes import HOST_LOST, PREEMPTED

DEADLINE = 60.0
# Its clock is ahead of ours by a second for each byte of a file.
AGENT = """
import os, time
now = time.monotonic
time.monotonic = lambda: now() + os.stat({clock!r}).st_size
import tfdist.launcher.hosts.agent as agent
agent.main()
"""


@contextmanager
def agent(tmp_path: Path, **hello: object) -> Iterator[tuple[Channel, subprocess.Popen]]:
    """An agent that has been greeted."""
    greeting, pipe = os.urandom(16).hex(), subprocess.PIPE
    (tmp_path / "clock").touch()
    words = [sys.executable, "-c", AGENT.format(clock=str(tmp_path / "clock"))]
    process = subprocess.Popen(words, bufsize=0, stdin=pipe, stdout=pipe, start_new_session=True)
    channel = Channel(process.stdout, process.stdin, greeting)
    fields = {"run_id": "", "restart": 0, "variables": {}, "log_dir": str(tmp_path / "logs"), "probe": "/no/probe"}
    own = {"kind": "hello", "greeting": greeting, "is_here": True}
    channel.send(line(**own, **{**fields, **hello}))
    try:
        assert heard(channel, "hello")["version"] == __version__
        yield channel, process
    finally:
        channel.close()
        process.wait(DEADLINE)


def heard(channel: Channel, kind: str, told: list | None = None) -> dict:
    """Waits for a message; `told` gets, and may begin with, what comes with it."""
    told = [] if told is None else told
    end = time.monotonic() + DEADLINE
    while time.monotonic() < end:
        found = [one for one in told if one["kind"] == kind]
        if found:
            return found[0]
        told += channel.receive()
        time.sleep(0.01)
    pytest.fail(f"waited in vain for {kind}")


def start(channel: Channel, *command: str | None, told: list | None = None) -> int:
    what = {"job": "worker", "index": 0, "env": {}, "cpus": [], "serves": False}
    channel.send(line(kind="start", command=command, **what))
    return heard(channel, "started", told)["pid"]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_agent_ends_all_when_its_launcher_falls_silent(tmp_path) -> None:
    with agent(tmp_path) as (channel, process):
        pid = start(channel, "sleep", "1000")
        for beats in range(1, 4):
            os.truncate(tmp_path / "clock", beats * int(SILENCE) // 2)
            channel.send(line(kind="beat"))
            channel.send(line(kind="prepare", count=1, towards="127.0.0.1"))
            heard(channel, "ready")
            assert not is_gone(pid)
        # Connected, but nothing comes any more: a network that is cut.
        os.truncate(tmp_path / "clock", beats * int(SILENCE) // 2 + int(SILENCE) + 1)
        assert process.wait(DEADLINE) == 1
        wait_until(lambda: is_gone(pid), DEADLINE, "the end of what it had started")


def test_an_agent_ends_all_when_the_connection_ends(tmp_path) -> None:
    with agent(tmp_path) as (channel, process):
        pid = start(channel, "sleep", "1000")
        channel.close()
        assert process.wait(DEADLINE) == 1
        wait_until(lambda: is_gone(pid), DEADLINE, "the end of what it had started")


def test_an_agent_without_processes_just_ends(tmp_path) -> None:
    with agent(tmp_path) as (channel, process):
        channel.close()
        assert process.wait(DEADLINE) == 0


def test_a_new_agent_ends_what_an_attempt_that_was_cut_off_has_left(tmp_path) -> None:
    left = subprocess.Popen(["sleep", "1000"], env={**os.environ, "TFDIST_RUN_ID": f"run {tmp_path.name}"})
    other = subprocess.Popen(["sleep", "1000"], env={**os.environ, "TFDIST_RUN_ID": "of others"})
    try:
        with agent(tmp_path, run_id=f"run {tmp_path.name}", restart=1):
            assert left.wait(DEADLINE) == -9 and other.poll() is None
    finally:
        left.kill()
        other.kill()
        left.wait()
        other.wait()


def test_events_come_where_folders_are_not_shared(tmp_path) -> None:
    """Other hosts may share this one's folder; their agents tell of what their processes write there."""
    with agent(tmp_path) as (channel, _):
        event = '{"time": 5.0, "name": "worker 0", "event": "saved", "step": 3}'
        of_another = event.replace("worker 0", "worker 1")
        told: list = []
        log = f"'{tmp_path}/logs/events.jsonl'"
        start(channel, "sh", "-c", f"(echo '{of_another}'; echo '{event}'; printf no-end) >> {log}", told=told)
        assert heard(channel, "events", told)["text"] == event + "\n"


def test_what_an_agent_tells_of_a_process_comes_in_order(tmp_path) -> None:
    told: list = []
    with agent(tmp_path) as (channel, _):
        start(channel, "sh", "-c", "printf one; printf two >&2; exit 3", told=told)
        heard(channel, "over", told)
    kinds = [one["kind"] for one in told]
    assert b"".join(base64.b64decode(one["data"]) for one in told if one["kind"] == "output") == b"onetwo"
    assert next(one for one in told if one["kind"] == "end")["status"] == 3
    assert kinds.index("end") > max(at for at, kind in enumerate(kinds) if kind == "output")
    assert kinds[-1] == "over"


def test_a_process_in_the_place_of_another_one_is_a_new_one_to_an_agent(tmp_path) -> None:
    """Its reports are told from the first one on, and nothing is left of the other one."""
    report = "from tfdist.supervision.progress import ProgressWriter; ProgressWriter.from_environment().begin()"
    descriptors = []
    with agent(tmp_path) as (channel, process):
        for _ in range(3):
            told: list = []
            start(channel, None, "-c", report, told=told)
            heard(channel, "over", told)
            assert [one["reports"] for one in told if one["kind"] == "progress"] == [1]
            descriptors.append(psutil.Process(process.pid).num_fds())
    assert len(set(descriptors)) == 1


@pytest.mark.nightly
def test_an_agent_hears_its_processes_only_as_fast_as_it_can_tell(tmp_path) -> None:
    """Nobody reads: what it keeps has a limit, and the process waits."""
    with agent(tmp_path) as (channel, process):
        start(channel, sys.executable, "-c", "import sys\nwhile True: sys.stdout.write('x' * 65536)")
        before = psutil.Process(process.pid).memory_info().rss
        time.sleep(3)
        assert psutil.Process(process.pid).memory_info().rss - before < 50 << 20


def test_a_host_that_falls_silent_is_lost(tmp_path) -> None:
    with reached(tmp_path, "one", "two") as hosts:
        one, two = hosts.connections.values()
        end = time.monotonic() + DEADLINE
        while not two.lost and time.monotonic() < end:
            one.channel.heard = time.monotonic()
            two.channel.heard = time.monotonic() - connections.SILENCE - 1  # the only difference between them
            one.hear()
            two.hear()  # what it has said before may still come
        assert two.lost.startswith("host two does not answer any more: no sign of it for ") and not one.lost


@contextmanager
def reached(tmp_path: Path, *names: str) -> Iterator[Reached]:
    """Hosts that are this machine."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nwhile [ $# -gt 1 ]; do shift; done\nexec /bin/sh -c "$1"\n')
    ssh.chmod(0o755)
    (tmp_path / "logs").mkdir()
    listed = [ListedHost(name, 1) for name in names]
    reach = Reach((str(ssh),), None, str(tmp_path), "run", str(tmp_path / "logs"), {})
    with Reached.reach(listed, reach) as hosts:
        assert not hosts.problems
        yield hosts


def test_a_heart_beats_while_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now))
    reading, writing = os.pipe()
    channel = Channel(FileIO(os.dup(reading), "rb"), FileIO(writing, "wb"))
    for tick in range(81):
        now = tick / 8
        channel.beat()
    assert channel.receive() == [{"kind": "beat"}] * 5  # every two seconds
    channel.close()
    os.close(reading)


def test_what_no_agent_says_ends_the_connection(tmp_path) -> None:
    with reached(tmp_path, "one") as hosts:
        (one,) = hosts.connections.values()
        one.channel.receive = lambda: [{"kind": "end", "name": "worker 0", "status": "x"}]
        assert one.hear() == []
        assert one.lost.startswith("host one: its agent has said {'kind': 'end', ")
        assert "its status is 'x'" in one.lost


class _Connection(Connection):
    """A host of which a test decides what comes, and when."""

    silence = 0.0

    def __init__(self, name: str) -> None:
        self.host, self.lost = ListedHost(name), ""
        reading, writing = os.pipe()
        self.channel = SimpleNamespace(reading=reading, writing=writing, heard=time.monotonic(), beat=lambda: None)
        self.send = lambda **fields: None
        self.pid, self.told, self.is_here = 0, [], False

    def hear(self) -> list:
        told, self.told = self.told, []
        for one in told:
            try:
                check_said(one)
            except ValueError as error:
                self.lose(str(error))
                return []
        return told

    def lose(self, why: str) -> None:
        self.lost = why


@pytest.mark.parametrize("ports", [[], [1], [1, 2, 3]])
def test_an_agent_that_tells_another_number_of_ports_is_refused(ports: list[int]) -> None:
    told = {"kind": "ready", "address": "10.0.0.1", "ports": ports}
    with pytest.raises(HostsError, match=re.escape(f"host a: Received: {ports}. Expected: 2 ports")):
        connections._place(SimpleNamespace(name="a", answer=told), 2)


@pytest.mark.parametrize("silence", [4.0, 12.0])
def test_a_host_that_has_fallen_silent_is_to_blame_for_failures_elsewhere(tmp_path, silence: float) -> None:
    """TensorFlow notices within ten seconds that a host is cut off, and then the processes of the others fail."""
    with group_of_two(tmp_path) as (group, one, two):
        two.silence = silence
        said = base64.b64encode(b"UnavailableError: gone\n").decode()
        one.told = [
            {"kind": "output", "name": "worker 0", "data": said},
            {"kind": "end", "name": "worker 0", "status": 1},
        ]
        ended = group.tick()
        failures = [group.failure(process, process.status) for process in ended]
        assert [process.plan.name for process in ended] == ["worker 0", "worker 1"][: 2 if silence > 8 else 1]
        culprit = choose(failures)
        assert culprit.name == ("worker 1" if silence > 8 else "worker 0")
        if silence > 8:
            assert culprit.cause == "host two does not answer any more: no sign of it for 12 s; it ran worker 1"
        else:
            assert culprit.cause == "worker 0 on one failed with exit code 1 (UnavailableError: gone)"


@pytest.mark.parametrize(
    ("status", "cause", "code"),
    [
        (-signal.SIGKILL, "host two is lost: its agent is gone; it ran worker 1", HOST_LOST),
        (3, "worker 1 on two failed with exit code 3", 3),
        (PREEMPTED, "worker 1 on two failed with exit code 77", PREEMPTED),
    ],
)
def test_what_is_blamed_where_a_process_and_its_host_end_at_once(tmp_path, status: int, cause: str, code: int) -> None:
    """What goes down with a host is killed; an exit code is a program's own."""
    with group_of_two(tmp_path) as (group, _, two):
        two.told = [{"kind": "end", "name": "worker 1", "status": status}, {"kind": "over", "name": "worker 1"}]
        two.lose("host two is lost: its agent is gone")
        (process,) = group.tick()
        failure = group.failure(process, process.status)
        assert (failure.cause, failure.exit_code) == (cause, code)
        assert not group.tick()


def test_what_is_started_in_the_place_of_another_process_has_not_reported(tmp_path) -> None:
    with group_of_two(tmp_path) as (group, _, two):
        report = {"time": 0.0, "reports": 9, "phase": "training", "step": 7, "resumed_step": None, "waits_to": ""}
        ends = [{"kind": "end", "name": "worker 1", "status": 1}, {"kind": "over", "name": "worker 1"}]
        two.told = [{"kind": "progress", "name": "worker 1", **report}, *ends]
        (dead,) = group.tick()
        assert group.progress()["worker 1"].step == 7
        group.replace(dead, 1)
        assert group.progress() == {"worker 0": None, "worker 1": None}
        two.told = [{"kind": "started", "name": "worker 1", "pid": 3}]
        group.tick()
        assert [process.group for process in group.processes] == [1, 3]


def test_the_guardian_forgets_ssh_of_a_host_that_is_lost(tmp_path) -> None:
    """Its number may be somebody else's by the time the guardian kills."""
    with group_of_two(tmp_path) as (group, one, two):
        forgotten: list[int] = []
        group._guardian.remove = forgotten.append
        one.pid, two.pid = 41, 42
        group.tick()
        assert not forgotten
        two.lose("gone")
        group.tick()
        group.tick()
        assert forgotten == [42]


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)
NAMES = ("name", "pid", "status", "text", "time", "reports", "phase", "step", "resumed_step")
KINDS = ("started", "end", "over", "closed", "progress", "error", "events", "message", "ready", "hello", "x")
TOLD = st.one_of(
    st.builds(
        lambda name, data: {"kind": "output", "name": name, "data": data},
        st.sampled_from(["worker 0", "worker 1", "worker 7"]) | VALUES,
        st.binary(max_size=20).map(lambda data: base64.b64encode(data).decode()) | VALUES,
    ),
    st.builds(
        lambda kind, name, more: {"kind": kind, "name": name, **more},
        st.sampled_from(KINDS),
        st.sampled_from(["worker 0", "worker 1", "worker 7"]) | VALUES,
        st.dictionaries(st.sampled_from(NAMES[1:]), VALUES),
    ),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(TOLD, max_size=4))
def test_whatever_an_agent_says_is_taken_or_ends_its_connection(tmp_path, told: list) -> None:
    with group_of_two(tmp_path) as (group, one, two):
        one.told = told
        group.tick()
        assert not two.lost
        for report in group.progress().values():
            assert report is None or isinstance(report.step, int)


@contextmanager
def group_of_two(tmp_path: Path) -> Iterator[tuple[HostsGroup, _Connection, _Connection]]:
    """Two processes, each on a host of its own, which have started; they end with the block."""
    one, two = _Connection("one"), _Connection("two")
    hosts = SimpleNamespace(connections={"one": one, "two": two})
    plans = [ProcessPlan("worker", index, ("true",), {}, host=name) for index, name in enumerate(("one", "two"))]
    guardian = SimpleNamespace(add=lambda pid: None, remove=lambda pid: None)
    one.told = [{"kind": "started", "name": "worker 0", "pid": 1}]
    two.told = [{"kind": "started", "name": "worker 1", "pid": 2}]
    terminal = Terminal(io.BytesIO(), is_tty=False)
    try:
        with HostsGroup(plans, tmp_path, terminal, guardian, 0, hosts) as group:
            try:
                yield group, one, two
            finally:
                for connection, name in ((one, "worker 0"), (two, "worker 1")):
                    ends = [{"kind": "end", "name": name, "status": 0}, {"kind": "over", "name": name}]
                    connection.told = [] if connection.lost else ends
    finally:
        for connection in (one, two):
            os.close(connection.channel.reading)
            os.close(connection.channel.writing)
