"""The processes of an attempt on several hosts, as the supervisor knows those of one machine."""

from __future__ import annotations

import base64
import dataclasses
import selectors
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tfdist.cluster.foreign_text import cleaned
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.hosts.connection import SUSPICIOUS, Connection, HostsError, Message, Reached
from tfdist.launcher.output import Terminal, Writer
from tfdist.launcher.plan import ProcessPlan
from tfdist.launcher.policy import Failure
from tfdist.launcher.process import Process, ProcessGroup
from tfdist.supervision.events import EventLog, events_in
from tfdist.supervision.exit_codes import HOST_LOST
from tfdist.supervision.progress import Progress

_TICK = 0.02
_START_SECONDS = 60.0
# What shells return for a command that cannot be run.
_NOT_STARTED = 127
# How long nothing is heard while much waits to be shown, or written to the logs.
_LONGEST_PAUSE = 2.0
# After a longer pause this process was stopped itself: the silence of others means nothing.
_OWN_PAUSE = 5.0


class RemoteProcess(Process):
    """A process that an agent runs.

    Args:
        plan: what to run.
        log_dir: folder of the logs, on this machine.
        continues: see `Process`.
        files: writes the log.
        connection: to the agent.
    """

    def __init__(self, plan: ProcessPlan, log_dir: Path, continues: str, files: Writer, connection: Connection) -> None:
        super().__init__(plan, log_dir, continues, files=files)
        self.connection = connection
        self._has_ended = False

    def start(self) -> None:
        """Asks for its start."""
        self._started_at = time.monotonic()
        plan = self.plan
        # The agent's own Python may be another one.
        command = [None if word == sys.executable and not at else word for at, word in enumerate(plan.command)]
        self.connection.send(
            kind="start",
            job=plan.job,
            index=plan.index,
            command=command,
            env=dict(plan.env),
            cpus=plan.cpus,
            serves=plan.serves,
        )

    @property
    def state(self) -> str:
        """What it is doing: not known here."""
        return ""

    def poll(self) -> bool:
        """True exactly once, when it is first known to have ended."""
        has_ended, self._has_ended = self._has_ended, False
        return has_ended

    def signal(self, number: int) -> None:
        """Sends a signal as `Process` does, over there."""
        if not self.is_over:
            self.connection.send(kind="signal", name=self.plan.name, number=int(number))

    def kill(self) -> None:
        """Has the agent kill the whole group; a second call does nothing."""
        if not self.is_over and self._killed_at is None:
            self._killed_at = time.monotonic()
            self.connection.send(kind="kill", name=self.plan.name)

    def note(self, told: Message) -> None:
        """Takes what the agent says of it."""
        match told["kind"]:
            case "started":
                self.group = told["pid"]
            case "end" if self.status is None:
                self._end(told["status"])
            case "over" if self.status is not None:
                self.is_over = True
            case "error":
                self.hear(f"{cleaned(told['text'])}\n".encode())
                self._end(_NOT_STARTED)
                self.is_over = True

    def lose(self, why: str) -> None:
        """Says that its host is of no use any more.

        A process that was killed, and whose end nobody has heard of, went down with the host. An exit code is its own.
        """
        self.lost = why
        if self.status is None or (self._has_ended and self.status < 0):
            self._end(HOST_LOST)
        self.is_over = True

    def _end(self, status: int) -> None:
        self.status, self._ended_at, self._has_ended = status, time.monotonic(), True


class HostsGroup(ProcessGroup):
    """All processes of an attempt on several hosts. None of them outlives the `with` block, as far as the hosts answer.

    Args:
        plans: the processes, that with rank 0 first.
        log_dir: folder of the logs.
        terminal: where their output goes.
        guardian: ends ssh if the launcher is killed.
        restart: how often the run has been started again.
        reached: the hosts.
    """

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        log_dir: Path,
        terminal: Terminal,
        guardian: Guardian,
        restart: int,
        reached: Reached,
    ) -> None:
        self._connections = reached.connections
        # By the names of host and process: those that are there now.
        self._remote: dict[tuple[str, str], RemoteProcess] = {}
        self._progress: dict[str, Progress | None] = {}
        self._failed = ""
        self._looked_at = time.monotonic()
        super().__init__(plans, log_dir, terminal, guardian, restart)
        for connection in self._connections.values():
            self._selector.register(connection.channel.reading, selectors.EVENT_READ)

    def _made(self, plan: ProcessPlan, continues: str) -> Process:
        plan = dataclasses.replace(plan, env={**plan.env, **self._room_for(plan)})
        if not plan.serves:
            self._progress[plan.name] = None
        assert self._log_dir is not None
        process = RemoteProcess(plan, self._log_dir, continues, self._files, self._connections[plan.host])
        self._remote[plan.host, plan.name] = process
        return process

    def __enter__(self) -> HostsGroup:
        for connection in self._connections.values():
            self._guardian.add(connection.pid)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        while not self.is_over:
            self.tick()
        super().__exit__(*error)
        for connection in self._connections.values():
            self._guardian.remove(connection.pid)

    def progress(self) -> dict[str, Progress | None]:
        """The last report of each training process that makes reports, by name."""
        return dict(self._progress)

    def failure(self, process: Process, status: int, hang: str = "") -> Failure:
        """Describes what became of a process, with the last lines of its log, or of its host."""
        assert isinstance(process, RemoteProcess)
        lost = process.lost if status == HOST_LOST and not hang else ""
        return dataclasses.replace(super().failure(process, status, hang), lost=lost)

    def _start(self, process: Process) -> None:
        process.start()
        self._started.append(process)

    def _wait_for_starts(self) -> None:
        """Until all have started, or it is known why not."""
        deadline = time.monotonic() + _START_SECONDS
        while waiting := [one for one in self._remote.values() if not (one.group or one.lost) and one.status is None]:
            self._hear()
            self._note_losses()
            if self._failed:
                raise HostsError(self._failed)
            if time.monotonic() > deadline:
                names = ", ".join(dict.fromkeys(one.plan.host for one in waiting))
                raise HostsError(f"no process has started within {_START_SECONDS:g} s on {names}")

    def _hear(self) -> None:
        # What is not heard is not known to live: not for long.
        if self._is_behind and time.monotonic() - self._looked_at < _LONGEST_PAUSE:
            time.sleep(_TICK)
            return
        self._selector.select(_TICK)
        now = time.monotonic()
        has_paused, self._looked_at = now - self._looked_at > _OWN_PAUSE, now
        for connection in self._connections.values():
            if has_paused:
                connection.channel.heard = now
            for told in connection.hear():
                try:
                    self._take(connection, told)
                except (KeyError, ValueError) as error:
                    connection.lose(f"host {connection.name}: its agent has said {cleaned(told, 200)} ({error!r})")
            if not connection.lost:
                connection.channel.beat()
            elif connection.channel.reading in self._selector.get_map():
                self._selector.unregister(connection.channel.reading)
                self._guardian.remove(connection.pid)  # it is killed, and its number somebody else's, perhaps

    def _poll_processes(self) -> list[Process]:
        self._note_losses()
        ended = [process for process in self._started if process.poll()]
        if any(process.status and not process.lost for process in ended):
            # What has made it fail may be a host that was cut off: TensorFlow notices that first.
            for connection in self._connections.values():
                if not connection.lost and connection.silence > SUSPICIOUS:
                    connection.lose(
                        f"host {connection.name} does not answer any more: no sign of it for {connection.silence:.0f} s"
                    )
            self._note_losses()
            ended += [process for process in self._started if process.poll()]
        return ended

    def _note_losses(self) -> None:
        for process in self._remote.values():
            if process.connection.lost and not process.lost:
                process.lose(process.connection.lost)
                self._terminal.feed(process.plan.name, b"", final=True)

    def _take(self, connection: Connection, told: Message) -> None:
        if "name" not in told:
            match told["kind"]:
                case "message":
                    self._terminal.message(f"host {connection.name}: {cleaned(told['text'])}")
                case "events":
                    self._log_events(told["text"])
            return
        process = self._remote[connection.name, told["name"]]
        match told["kind"]:
            case "output":
                data = base64.b64decode(told["data"])
                process.hear(data)
                if process.plan.shown:
                    self._terminal.feed(process.plan.name, data)
            case "progress":
                self._note_progress(process, told)
            case "closed" if process.plan.shown:
                self._terminal.feed(process.plan.name, b"", final=True)
            case "error":
                self._failed = f"host {connection.name}: {process.plan.name}: {cleaned(told['text'])}"
        process.note(told)

    def _note_progress(self, process: RemoteProcess, told: Message) -> None:
        if process.plan.name not in self._progress:
            return
        self._progress[process.plan.name] = Progress(
            # Told is how long ago it was made.
            time=time.monotonic() - max(told["time"], 0.0),
            reports=told["reports"],
            phase=cleaned(told["phase"], 16),
            step=told["step"],
            resumed_step=told["resumed_step"],
            waits_to=cleaned(told["waits_to"], 48),
        )

    def _log_events(self, text: str) -> None:
        """Where the folder of logs is not shared, what is appended to its events over there belongs to ours."""
        for event in events_in(text):
            EventLog(str(self._log_dir), event["name"], do=self._files.do).append(event)
