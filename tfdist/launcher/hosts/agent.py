"""The agent of a run on one host: starts what the launcher asks for, and ends all of it when the launcher is gone.

It hears the launcher through its standard input, and answers through its standard output. Both are those of ssh, or of
the launcher itself on the machine where that runs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path
from typing import Any

from tfdist import __version__
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.ports import Reservation, reserve
from tfdist.cluster.rendezvous.endpoints import own_host, port_range
from tfdist.launcher.guardian import Guardian, kill_run
from tfdist.launcher.hosts.connection import Channel, Message, line
from tfdist.launcher.plan import RESERVED, Machine, ProcessPlan
from tfdist.launcher.process import Process, ProcessGroup
from tfdist.supervision.events import EventStream
from tfdist.supervision.identity import this_host

# The launcher's heart beats every two seconds. Without it for so long, the network or the launcher's machine is gone:
# whoever waits there for another start must not meet these processes.
SILENCE = 60.0
_HELLO_SECONDS = 60.0
_TICK = 0.02
# No process is heard while so much waits to be sent: it then waits itself, as it would for a slow terminal.
_MOST_UNSENT = 1 << 20
_REPORT_PAUSE = 0.1


class Agent:
    """Does what the launcher asks for, and tells it what happens: to its processes it is the terminal.

    Args:
        channel: to the launcher.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._processes: dict[str, Process] = {}
        self._reports: dict[str, int] = {}
        self._next_report = 0.0
        self._reservation: Reservation | None = None
        # What the processes here append to their event log, where that is not the launcher's.
        self._events: EventStream | None = None
        self._hello: Message = {}

    def run(self) -> None:
        """Returns when the launcher has said goodbye. If it is gone, or silent, this process ends by itself."""
        if not self._greet():
            return
        with (
            Guardian() as guardian,
            ProcessGroup([], None, self, guardian) as self._group,  # type: ignore[arg-type]
        ):
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
                self._channel.beat()
        if self._reservation is not None:
            self._reservation.close()

    @property
    def is_behind(self) -> bool:
        """As that of a `Terminal`, and so are the following."""
        return len(self._channel.unsent) > _MOST_UNSENT

    def columns_inside(self, name: str) -> None:
        """The launcher has set that."""

    def feed(self, name: str, data: bytes, final: bool = False) -> None:
        """Tells what a process has printed."""
        if data:
            self._channel.send(line(kind="output", name=name, data=base64.b64encode(data).decode()))
        if final:
            self._channel.send(line(kind="closed", name=name))

    def message(self, text: str) -> None:
        """Tells something to the user."""
        self._channel.send(line(kind="message", text=text))

    def _greet(self) -> bool:
        deadline = time.monotonic() + _HELLO_SECONDS
        while not (asked := self._channel.receive()):
            if self._channel.has_ended or time.monotonic() > deadline:
                return False
            time.sleep(_TICK)
        self._hello = hello = asked[0]
        if hello["restart"]:
            kill_run(hello["run_id"])  # what is left of an attempt from which this host was cut off
        machine = Machine.this_one({**os.environ, "PATH": hello["variables"].get("PATH", os.environ.get("PATH", ""))})
        shares_logs = os.path.exists(hello["probe"])
        if not shares_logs:
            self._follow_events(Path(hello["log_dir"]))
        answer = line(
            kind="hello",
            greeting=hello["greeting"],
            version=__version__,
            machine=this_host(),
            cores=machine.cores,
            gpus=machine.gpus,
            shares_logs=shares_logs,
        )
        # The shell may have left a line without an end.
        self._channel.send(b"\n" + answer)
        return True

    def _follow_events(self, log_dir: Path) -> None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.message(f"no folder for events there: {error}; those of its processes are lost")
        self._events = EventStream(log_dir)
        with contextlib.suppress(OSError):
            self._events.read()  # what is there already was told by another agent

    def _obey(self, asked: Any) -> None:
        process = self._processes.get(asked.get("name", ""))
        match asked["kind"]:
            case "prepare":
                self._prepare(asked["count"], asked["towards"])
            case "start":
                self._start(asked)
            case "signal" if process is not None:
                process.signal(asked["number"])
            case "kill" if process is not None:
                process.kill()

    def _prepare(self, count: int, towards: str) -> None:
        try:
            address = self._address(towards)
            low, high = port_range(self._hello["variables"])
            self._reservation = reserve(count, low=low, high=high)
        except ClusterError as error:
            self._channel.send(line(kind="error", text=str(error)))
        else:
            self._channel.send(line(kind="ready", address=address, ports=self._reservation.ports))

    def _address(self, towards: str) -> str:
        """The address by which other hosts reach this one; that for another one, if there is nothing better."""
        variables = self._hello["variables"]
        asked = own_host({"TFDIST_INTERFACE": variables.get("TFDIST_INTERFACE", "")}, None)
        # The user's own session on the launcher's machine may have come from anywhere.
        connection = [] if self._hello["is_here"] else os.environ.get("SSH_CONNECTION", "").split()
        return asked or (connection[2] if len(connection) == 4 else _source_address(towards))

    def _start(self, asked: Message) -> None:
        name = f"{asked['job']} {asked['index']}"
        environ = {name: value for name, value in os.environ.items() if name not in RESERVED}
        # The launcher's own Python may be elsewhere here.
        command = [sys.executable if word is None else word for word in asked["command"]]
        env, cpus = {**environ, **asked["env"]}, tuple(asked["cpus"])
        plan = ProcessPlan(asked["job"], asked["index"], tuple(command), env, cpus, shown=True, serves=asked["serves"])
        self._reports.pop(name, None)  # one that it replaces may have made as many
        try:
            self._processes[name] = process = self._group.add(plan)
        except OSError as error:
            self._channel.send(line(kind="error", name=name, text=str(error)))
        else:
            self._channel.send(line(kind="started", name=name, pid=process.group))

    def _report_ends(self, ended: list[Process]) -> None:
        for process in ended:
            self._group.read_available(process)
            self._report_progress()
            self._channel.send(line(kind="end", name=process.plan.name, status=process.status))
        for name in [name for name, process in self._processes.items() if process.is_over]:
            self._report_events()
            del self._processes[name]
            self._channel.send(line(kind="over", name=name))

    def _report(self) -> None:
        if time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + _REPORT_PAUSE
            self._report_progress()
            self._report_events()

    def _report_progress(self) -> None:
        now = time.monotonic()
        for name, report in self._group.progress().items():
            if report is None or report.reports == self._reports.get(name):
                continue
            self._reports[name] = report.reports
            # The clocks of two machines have nothing to do with each other.
            self._channel.send(line(kind="progress", name=name, **asdict(replace(report, time=now - report.time))))

    def _report_events(self) -> None:
        if self._events is None:
            return
        with contextlib.suppress(OSError):
            # Other hosts may write to the same file, and their agents tell of that.
            if own := [event for event in self._events.read() if event["name"] in self._processes]:
                self._channel.send(line(kind="events", text="".join(f"{json.dumps(event)}\n" for event in own)))


def _source_address(towards: str) -> str:
    """The address of this machine from which another one is reached."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def main() -> None:
    """The agent's process."""
    reading, writing = FileIO(os.dup(0), "rb"), FileIO(os.dup(1), "wb")
    # Whatever else prints here must not get in between: it goes to standard error.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    Agent(Channel(reading, writing)).run()
