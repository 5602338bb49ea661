"""The agent of a run on one host: starts what the launcher asks for, and ends all of it when the launcher is gone.

It hears the launcher through its standard input, and answers through its standard output. Both are those of ssh, or of
the launcher itself on the machine where that runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.ports import Reservation, reserve
from tfdist.cluster.rendezvous.endpoints import own_host, port_range
from tfdist.launcher.group import ProcessGroup
from tfdist.launcher.guardian import Guardian, kill_run
from tfdist.launcher.hosts.frames import Channel, Message, message, output
from tfdist.launcher.machine import Machine, own_version
from tfdist.launcher.process import Process
from tfdist.launcher.run_plan import RESERVED, ProcessPlan
from tfdist.supervision.events import FILE_NAME, event_in
from tfdist.supervision.identity import this_host

# The launcher's heart beats every two seconds, also while it waits for its terminal. Without it for so long, the
# network or the launcher's machine is gone: whoever waits there for another start must not meet these processes.
SILENCE = 60.0
BEAT = 2.0
_HELLO_SECONDS = 60.0
_TICK = 0.02
# No process is heard while so much waits to be sent: it then waits itself, as it would for a slow terminal.
_MOST_UNSENT = 1 << 20
_PROGRESS_PAUSE, _STATE_PAUSE, _EVENTS_PAUSE = 0.1, 0.25, 0.5
_SWEEPS, _SWEEP_PAUSE = 40, 0.05
_MOST_EVENTS = 1 << 20


class _Reporter:
    """In the place of a terminal: tells the launcher."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.numbers: dict[str, int] = {}
        self.size: os.terminal_size | None = None

    @property
    def is_tty(self) -> bool:
        return self.size is not None

    def size_inside(self, name: str) -> os.terminal_size | None:
        return self.size

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        if data:
            self._channel.send(output(self.numbers[name], data))
        if final:
            self._channel.send(message(kind="closed", name=name))

    def message(self, text: str) -> None:
        self._channel.send(message(kind="message", text=text))


class _Group(ProcessGroup):
    """Is deaf while the launcher cannot hear."""

    def __init__(self, channel: Channel, reporter: _Reporter, guardian: Guardian) -> None:
        super().__init__([], None, reporter, guardian)  # type: ignore[arg-type]
        self._channel = channel

    def _hear(self) -> None:
        if self._channel.unsent > _MOST_UNSENT:
            time.sleep(_TICK)
        else:
            super()._hear()


class Agent:
    """Does what the launcher asks for.

    Args:
        channel: to the launcher.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._reporter = _Reporter(channel)
        self._processes: dict[str, Process] = {}
        self._reports: dict[str, int] = {}
        self._states: dict[str, str] = {}
        self._over: set[Process] = set()
        self._next = dict.fromkeys(("beat", "progress", "state", "events"), 0.0)
        self._reservation: Reservation | None = None
        self._events: _Events | None = None
        self._hello: Message = {}

    def run(self) -> None:
        """Returns when the launcher has said goodbye. If it is gone, or silent, this process ends by itself."""
        if not self._greet():
            return
        with Guardian() as guardian, _Group(self._channel, self._reporter, guardian) as self._group:
            while True:
                for asked in self._channel.receive():
                    self._obey(asked)
                if self._channel.has_ended or time.monotonic() - self._channel.heard > SILENCE:
                    if not self._group.is_over:
                        # The guardian kills them, and their helpers. Nothing here can keep it from doing so.
                        os._exit(1)
                    break
                self._report_ends(self._group.tick())
                self._report()
                self._channel.send()
        if self._reservation is not None:
            self._reservation.close()

    def _greet(self) -> bool:
        deadline = time.monotonic() + _HELLO_SECONDS
        while not (asked := self._channel.receive()):
            if self._channel.has_ended or time.monotonic() > deadline:
                return False
            time.sleep(_TICK)
        self._hello = hello = asked[0]
        if hello["restart"]:
            # Of an attempt from which this host was cut off.
            for _ in range(_SWEEPS):
                if not kill_run(hello["run_id"]):
                    break
                time.sleep(_SWEEP_PAUSE)
        machine = Machine.this_one({**os.environ, "PATH": hello["variables"].get("PATH", os.environ.get("PATH", ""))})
        shares_logs = os.path.exists(hello["probe"])
        if not shares_logs:
            self._events = _Events(Path(hello["log_dir"]), self._reporter)
        answer = {
            "version": own_version(),
            "machine": this_host(),
            "cores": machine.cores,
            "gpus": machine.gpus,
            "shares_logs": shares_logs,
        }
        self._channel.send(bytes.fromhex(hello["greeting"]) + message(kind="hello", **answer))
        return True

    def _obey(self, asked: Any) -> None:
        kind, process = asked["kind"], self._processes.get(asked.get("name", ""))
        if kind == "prepare":
            self._prepare(asked["count"], asked["towards"])
        elif kind == "start":
            self._start(asked)
        elif kind == "signal" and process is not None:
            process.signal(asked["number"])
        elif kind == "kill" and process is not None:
            process.kill()
        elif kind == "resize":
            self._reporter.size = os.terminal_size(asked["size"])
            self._group.resize()

    def _prepare(self, count: int, towards: str) -> None:
        try:
            address = self._address(towards)
            low, high = port_range(self._hello["variables"])
            self._reservation = reserve(count, low=low, high=high)
        except ClusterError as error:
            self._channel.send(message(kind="error", text=str(error)))
        else:
            self._channel.send(message(kind="ready", address=address, ports=self._reservation.ports))

    def _address(self, towards: str) -> str:
        """The address by which other hosts reach this one; that for another one, if there is nothing better."""
        variables = self._hello["variables"]
        asked = own_host({"TFDIST_INTERFACE": variables.get("TFDIST_INTERFACE", "")}, None)
        # The user's own session on the launcher's machine may have come from anywhere.
        connection = [] if self._hello["is_here"] else os.environ.get("SSH_CONNECTION", "").split()
        return asked or (connection[2] if len(connection) == 4 else _source_address(towards))

    def _start(self, asked: Message) -> None:
        name = f"{asked['job']} {asked['index']}"
        self._reporter.numbers[name] = asked["number"]
        if asked["size"] is not None:
            self._reporter.size = os.terminal_size(asked["size"])
        environ = {name: value for name, value in os.environ.items() if name not in RESERVED}
        # The launcher's own Python may be elsewhere here.
        command = [sys.executable if word is None else word for word in asked["command"]]
        env, cpus = {**environ, **asked["env"]}, tuple(asked["cpus"])
        plan = ProcessPlan(asked["job"], asked["index"], tuple(command), env, cpus, shown=True, serves=asked["serves"])
        try:
            self._processes[name] = process = self._group.add(plan)
        except OSError as error:
            self._channel.send(message(kind="error", name=name, text=str(error)))
        else:
            self._channel.send(message(kind="started", name=name, pid=process.group))

    def _report_ends(self, ended: list[Process]) -> None:
        for process in ended:
            self._group.read_available(process)
            self._report_progress()
            self._channel.send(message(kind="end", name=process.plan.name, status=process.status))
        for name, process in self._processes.items():
            if process.is_over and process not in self._over:
                self._over.add(process)
                self._report_events()
                self._channel.send(message(kind="over", name=name))

    def _report(self) -> None:
        if self._is_due("beat", BEAT):
            self._channel.send(message(kind="beat"))
        if self._is_due("progress", _PROGRESS_PAUSE):
            self._report_progress()
        if self._is_due("state", _STATE_PAUSE):
            for name, process in self._processes.items():
                state = process.state if process.status is None else ""
                if state != self._states.get(name, ""):
                    self._states[name] = state
                    self._channel.send(message(kind="state", name=name, state=state))
        if self._is_due("events", _EVENTS_PAUSE):
            self._report_events()

    def _report_progress(self) -> None:
        now = time.monotonic()
        for name, report in self._group.progress().items():
            if report is None or report.reports == self._reports.get(name):
                continue
            self._reports[name] = report.reports
            what = {"reports": report.reports, "phase": report.phase, "step": report.step}
            more = {"resumed_step": report.resumed_step, "age": now - report.time}
            self._channel.send(message(kind="progress", name=name, **what, **more))

    def _report_events(self) -> None:
        if self._events is None:
            return
        # Other hosts may write to the same file, and their agents tell of that.
        lines = self._events.read().splitlines(keepends=True)
        own = [line for line in lines if (event := event_in(line)) and event["name"] in self._processes]
        if own:
            self._channel.send(message(kind="events", text="".join(own)))

    def _is_due(self, what: str, pause: float) -> bool:
        now = time.monotonic()
        is_due = now >= self._next[what]
        if is_due:
            self._next[what] = now + pause
        return is_due


class _Events:
    """What the processes here append to their event log, where that is not the launcher's."""

    def __init__(self, log_dir: Path, reporter: _Reporter) -> None:
        self._path, self._position = log_dir / FILE_NAME, 0
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reporter.message(f"no folder for events there: {error}; those of its processes are lost")
        with contextlib.suppress(OSError):
            self._position = self._path.stat().st_size

    def read(self) -> str:
        """The whole lines that have come since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read(_MOST_EVENTS)
        except OSError:
            return ""
        data = data[: data.rfind(b"\n") + 1]
        self._position += len(data)
        return data.decode(errors="replace")


def _source_address(towards: str) -> str:
    """The address of this machine from which another one is reached."""
    with contextlib.suppress(OSError), socket.socket(_family(towards), socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def main() -> None:
    """The agent's process."""
    reading, writing = os.dup(0), os.dup(1)
    # Whatever else prints here must not get in between: it goes to standard error.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    Agent(Channel(reading, writing)).run()
