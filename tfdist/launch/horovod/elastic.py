"""`tfdist run --backend horovod -n MIN:MAX --host-discovery PROGRAM`: Horovod says who takes part, tfdist runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tfdist.cluster.backend import HOROVOD, VARIABLE
from tfdist.launch.comeback import Comeback
from tfdist.launch.failure import exit_code
from tfdist.launch.guardian import Guardian
from tfdist.launch.horovod.discovery import check_network, discover_hosts
from tfdist.launch.machine import Machine
from tfdist.launch.plan import OF_CLUSTER, PlanError, runtime_defaults
from tfdist.launch.restarts import GiveUp, Incident, Restart, RestartPolicy
from tfdist.launch.signals import STOP_SIGNALS, SignalInbox
from tfdist.launch.terminal import Terminal
from tfdist.strategies.horovod.memory_folders import remove_abandoned
from tfdist.supervision.events import EventLog
from tfdist.supervision.exit_codes import PREEMPTED
from tfdist.supervision.identity import Identity
from tfdist.supervision.progress import Progress

_TICK = 0.05
_OF_HOSTS = "the program says how many processes a host has, which share its cores and take its GPUs in turn"
_NOT_WATCHED = "processes of elastic jobs are not watched for standing still; Horovod notices those that end"
# Why an option does nothing in an elastic job.
_REFUSED = {
    "chief": "Horovod gives the ranks, and rank 0 to another process when the first one is lost",
    "evaluator": "Horovod runs processes that train only",
    "cpus_per_worker": _OF_HOSTS,
    "gpus_per_worker": _OF_HOSTS,
    "host": "the program names the hosts",
    "hang_timeout": _NOT_WATCHED,
    "start_timeout": _NOT_WATCHED,
    "warm": "processes that are forked could be on this machine only",
}


@dataclass(frozen=True)
class ElasticOptions:
    """What the user asked for.

    Attributes:
        command: what each process runs.
        fewest: how many processes go on at least.
        most: how many there are at most.
        program: that prints a line `host:slots` for each host that can be used now.
        interface: the network interface that all hosts share; `None` lets Horovod look for it.
        show_all: whether the output of all processes is shown.
        grace: seconds between a signal that is passed on and SIGKILL.
        max_restarts: how often to start anew when too few processes are left.
    """

    command: tuple[str, ...]
    fewest: int
    most: int
    program: str
    interface: str | None
    show_all: bool
    grace: float
    max_restarts: int


def check_options(given: Collection[str], has_range: bool) -> None:
    """Checks the other options of an elastic job.

    Args:
        given: names of the options that were given.
        has_range: whether -n was.

    Raises:
        PlanError: for an option that would do nothing.
    """
    for name in (name for name in _REFUSED if name in given):
        option = f"--{name.replace('_', '-')}" if name != "warm" else "--warm/--no-warm"
        raise PlanError(f"{option} and --host-discovery: expected only one of them: {_REFUSED[name]}. Leave it out.")
    if not has_range:
        raise PlanError(
            "--host-discovery: expected -n MIN:MAX, too: with how many processes to go on at least, and how many there "
            "are at most."
        )


def check_hosts(options: ElasticOptions) -> list[str]:
    """Runs the program once, and returns what the user should know beforehand.

    Raises:
        PlanError: if it does not name hosts, or Horovod could not connect them.
    """
    hosts = discover_hosts(options.program)
    check_network(hosts, options.interface, options.program)
    slots = sum(hosts.values())
    if slots < options.fewest:
        return [f"{options.program} names hosts for {slots} processes: waiting until there are {options.fewest}"]
    if len(hosts) == 1:
        return [
            f"all processes are on one host, {next(iter(hosts))}: Horovod does not use a host again on which a process "
            "has failed, so the loss of one process ends all. Name other hosts, or other names of this one, too"
        ]
    return []


def elastic_announcement(options: ElasticOptions, log_dir: str) -> str:
    """The line at the start.

    Example:
        >>> elastic_announcement(ElasticOptions(("python", "t.py"), 1, 4, "hosts.sh", "lo", False, 10.0, 3), "logs")
        'Horovod keeps 1 to 4 processes running, on the hosts that hosts.sh names; complete logs in logs/'
    """
    counts = str(options.most) if options.fewest == options.most else f"{options.fewest} to {options.most}"
    return (
        f"Horovod keeps {counts} processes running, on the hosts that {options.program} names; complete logs in "
        f"{log_dir}/"
    )


def elastic_environment(
    environ: Mapping[str, str], own: Mapping[str, str], machine: Machine, most: int
) -> dict[str, str]:
    """The environment of the processes, but for what Horovod adds.

    Args:
        environ: the launcher's own.
        own: what the user has set by --env.
        machine: this machine.
        most: how many processes there are at most.
    """
    cores = max(1, len(machine.cores) // most)
    inherited = {name: value for name, value in environ.items() if name not in OF_CLUSTER}
    defaults = {**runtime_defaults(cores, len(machine.cores), ps_cluster=False), "PYTHONUNBUFFERED": "1"}
    return {**defaults, **inherited, **own, VARIABLE: HOROVOD}


class ElasticRun:
    """An elastic job, over restarts.

    Args:
        options: what the user asked for; checked by `check_hosts`.
        env: the environment of the processes.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
    """

    def __init__(self, options: ElasticOptions, env: Mapping[str, str], log_dir: Path, terminal: Terminal):
        self._options, self._env, self._log_dir, self._terminal = options, env, log_dir, terminal
        self._policy = RestartPolicy(options.max_restarts)
        self._events = EventLog(str(log_dir), "launcher")
        self._comeback: Comeback | None = None

    def run(self) -> int:
        """Returns the exit code once no process of the job exists any more."""
        # Needs Horovod, which is there if this is called.
        from tfdist.launch.horovod.driver import Driver, QuietHorovod
        from tfdist.launch.horovod.life import ElasticLife

        asked, number = self._options, 0
        remove_abandoned()
        try:
            with SignalInbox() as inbox, Guardian() as guardian, QuietHorovod(self._log_dir):
                while True:
                    launcher = asdict(Identity.of(os.getpid()))
                    self._events.write("start", restart=number, workers=asked.fewest, launcher=launcher)
                    env = {**self._env, "TFDIST_RESTART": str(number)}
                    driver = Driver(asked.fewest, asked.most, asked.program, asked.interface)
                    where = (self._log_dir, self._terminal, asked.show_all, guardian, inbox, asked.grace)
                    what = (driver, asked.fewest, asked.command, env)
                    ending = ElasticLife(*what, *where, number, self._on_progress).run()
                    if ending.interrupt is not None or ending.incident is None:
                        return self._conclude(ending.code, ending.error)
                    decision = self._decide(ending.incident)
                    if isinstance(decision, GiveUp):
                        return self._give_up(ending.incident, decision)
                    number = decision.number
                    if (code := _wait(decision.delay, inbox)) is not None:
                        return self._conclude(code, None)
        finally:
            remove_abandoned()

    def _on_progress(self, progress: Mapping[str, Progress | None]) -> None:
        if self._comeback is not None and self._comeback.is_complete(progress):
            outcome = self._comeback.outcome(progress, time.monotonic())
            self._events.write("training-again", **asdict(outcome))
            self._terminal.message(f"{self._comeback.headline}: {outcome}")
            self._comeback = None

    def _decide(self, incident: Incident) -> Restart | GiveUp:
        failure = incident.failure
        self._events.write(
            "failure", task=failure.name, cause=incident.cause, exit_code=failure.exit_code, log=failure.log_path
        )
        decision = self._policy.decide(incident)
        if isinstance(decision, Restart):
            self._events.write("restart", restart=decision.number, workers=decision.workers, delay=decision.delay)
            self._comeback = Comeback(incident, decision, self._policy.limit)
        return decision

    def _give_up(self, incident: Incident, decision: GiveUp) -> int:
        failure = incident.failure
        self._events.write("gave-up", reason=decision.reason, exit_code=failure.exit_code)
        reason = f"; {decision.reason}" if decision.reason else ""
        self._terminal.message(
            f"{incident.cause}{reason}; too few processes are left to go on, since Horovod does not use a host again "
            "on which one has failed. Started again, a script with BackupAndRestore goes on from its last backup. "
            f"Complete log: {failure.log_path}"
        )
        return failure.exit_code

    def _conclude(self, code: int, error: Exception | None) -> int:
        if code == PREEMPTED:
            self._events.write("preempted", exit_code=code)
        elif error is not None:
            self._events.write("gave-up", reason=str(error), exit_code=code)
            self._terminal.message(f"Horovod could not start the processes: {error}")
        else:
            self._events.write("complete" if code == 0 else "interrupted", exit_code=code)
        return code


def _wait(seconds: float, inbox: SignalInbox) -> int | None:
    """Waits so many seconds; returns the exit code if a signal has ended that."""
    end = time.monotonic() + seconds
    while True:
        number = next((number for number in inbox.take() if number in STOP_SIGNALS), None)
        if number is not None:
            return exit_code(-number)
        if time.monotonic() >= end:
            return None
        time.sleep(_TICK)
