"""`tfdist run --hosts` from its options to the exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.variables import TOKEN, text, travelling
from tfdist.launcher.arguments import Target, stages_of
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.hosts import places as places_of
from tfdist.launcher.hosts.connection import HostsError, Reach, Reached
from tfdist.launcher.hosts.group import HostsGroup
from tfdist.launcher.hosts.places import ListedHost, ListError, parse_hostfile, parse_hosts
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.output import Terminal, hidden_lines
from tfdist.launcher.plan import PlanError, ProcessPlan, RunOptions, shares_gpus
from tfdist.launcher.policy import Restart, RestartPolicy, counted, exit_code
from tfdist.launcher.process import ProcessGroup
from tfdist.launcher.run import (
    announcement,
    check_transport,
    check_workers,
    log_folder,
    new_run_id,
    shortest,
)
from tfdist.launcher.supervisor import Ending, Patience, TrainingRun
from tfdist.supervision.exit_codes import HOST_LOST

# Hosts, and what is to run there.
_Prepared = tuple[Reached, list[ProcessPlan]]
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 15.0
_TICK = 0.05


class _Interrupted(Exception):
    """A signal has come while the hosts were being reached."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(f"{number.name} received: not started")
        self.number, self.exit_code = number, exit_code(-number)


@dataclass(frozen=True)
class _Asked:
    """What each attempt needs to know.

    Attributes:
        options: what was asked for.
        fewest: with how few workers to go on.
        listed: the hosts.
        reach: how they are reached.
        command: what each process runs.
        environ: variables that all processes get.
        show_all: whether all output goes to the terminal.
    """

    options: RunOptions
    fewest: int
    listed: Sequence[ListedHost]
    reach: Reach
    command: Sequence[str]
    environ: Mapping[str, str]
    show_all: bool

    def slots(self, reached: Reached) -> dict[str, int]:
        """How many processes each of the hosts may have."""
        each = self.options.gpus_per_worker
        return {
            name: places_of.slots_of(reached.connections[name].host, machine, each)
            for name, machine in reached.machines.items()
        }


def run_on_hosts(
    target: Target,
    hosts: str | None,
    hostfile: str | None,
    ssh: str,
    remote_python: str | None,
    workers: tuple[int, int] | None,
    stages: int | None,
    replicas: int | None,
    ps: int,
    chief: bool,
    cpus_per_worker: int | str,
    gpus_per_worker: int | str,
    env: Mapping[str, str],
    log_dir: str | None,
    grace: float,
    output: str,
    max_restarts: int,
    hang_timeout: float | None,
    start_timeout: float,
    regrow_after: float,
    replace_workers: bool,
    transport: str,
    given: Collection[str] = (),
    **refused: object,
) -> int:
    """Runs a program as a cluster on several hosts and returns the exit code.

    `given` names the options that do not have their defaults by themselves; those of `refused` do nothing here.

    Raises:
        PlanError: the options ask for something that is not there.
        HostsError: a host cannot be reached, or used.
        OSError: the logs cannot be written.
    """
    option = "--hosts" if hosts is not None else "--hostfile"
    if "host" in given:
        raise PlanError(
            f"--host and {option}: expected only one of them: each host has the address at which ssh has reached it; "
            "TFDIST_INTERFACE names another network. Leave --host out."
        )
    try:
        listed = _listed(hosts, hostfile)
        parts = stages_of(workers, stages, replicas, ps, chief)
        fewest, most = workers or (0, 0)
        check_workers(fewest, most, ps)
        check_transport(transport)
        command = target.command()
    except ValueError as error:
        raise PlanError(str(error)) from None
    # How many there are is not known before the hosts are; all else is checked now.
    asked = (ps, chief, cpus_per_worker, gpus_per_worker, env)
    options = RunOptions(most or 1, *asked, stages=parts, transport=transport, replace_workers=replace_workers)
    run_id, show_all = new_run_id(), output == "all"
    folder = log_folder(log_dir, run_id)
    variables = travelling(os.environ)
    reach = Reach(tuple(_words(ssh)), remote_python, _working_folder(), run_id, str(folder), variables)
    # Who is on the network of the hosts must not be able to take the place of a process.
    token = {} if text({**variables, **env}, TOKEN) else {TOKEN: secrets.token_hex(16)}
    with _made(folder), SignalInbox() as inbox:
        try:
            first = Reached.reach(listed, reach, check=functools.partial(_check, inbox))
        except _Interrupted as stop:
            print(f"tfdist: {stop}", file=sys.stderr)
            return stop.exit_code
        with first:
            if first.problems:
                raise HostsError("\ntfdist: ".join(first.problems.values()))
            everything = _Asked(options, fewest, listed, reach, command, {**variables, **token}, show_all)
            slots = everything.slots(first)
            count = parts.workers if parts else most or sum(slots.values())
            _check_count(count, slots, f"--stages {stages}" if parts else f"-n {most}", option)
            options = replace(options, workers=count)
            places = places_of.place(options, slots)
            machines = first.machines
            places_of.check_places(options, places, machines)
            first_job, first_index = options.tasks[0]
            has_driver = any(machine.gpus for machine in machines.values())
            hidden = hidden_lines(show_all, {**os.environ, **env}, has_driver)
            terminal = Terminal.standard(live=f"{first_job} {first_index}", env=os.environ, hidden=hidden)
            shown = shortest(folder)
            terminal.message(announcement(options, str(shown), show_all, places_of.described(places)))
            for text_ in _notices(options, places, first):
                terminal.message(text_)
            policy = RestartPolicy(max_restarts, fewest if 0 < fewest < count else None, regrow_after)
            patience = Patience(grace, hang_timeout, start_timeout)
            everything = replace(everything, options=options, fewest=fewest or count)
            return HostsRun(everything, first, policy, shown, terminal, patience, inbox).run()


class HostsRun(TrainingRun):
    """Runs a cluster on several hosts.

    Args:
        asked: what each attempt needs to know.
        first: the hosts of the first attempt.
        policy: decides about restarts.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        patience: how long to wait for what.
        inbox: signals that have come before it runs.
    """

    def __init__(
        self,
        asked: _Asked,
        first: Reached,
        policy: RestartPolicy,
        log_dir: Path,
        terminal: Terminal,
        patience: Patience,
        inbox: SignalInbox,
    ) -> None:
        super().__init__(asked.options.workers, policy, log_dir, terminal, patience)
        self._asked, self._inbox = asked, inbox
        self._slots = asked.slots(first)
        self._first: Reached | None = first
        self._here: dict[str, int] = {}

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian) -> Ending:
        try:
            return super()._attempt(restart, inbox, guardian)
        except _Interrupted as stop:
            self.terminal.message(str(stop))
            return Ending(stop.exit_code, interrupt=stop.number)
        except (HostsError, PlanError) as error:
            is_lost = restart.number > 0 and isinstance(error, HostsError)
            return Ending(HOST_LOST if is_lost else 1, error=str(error))

    @contextmanager
    def _started(self, restart: Restart, inbox: SignalInbox, guardian: Guardian) -> Iterator[ProcessGroup]:
        check = functools.partial(_check, inbox, self._inbox)
        first, self._first = self._first, None
        reached, plans = self._prepared(first, restart, check) if first else self._reach_again(restart, check)
        with reached, HostsGroup(plans, self._log_dir, self.terminal, guardian, restart.number, reached) as group:
            self._here = self._asked.slots(reached)
            yield group

    def _prepared(self, reached: Reached, restart: Restart, check: Callable[[], object]) -> _Prepared:
        """Makes hosts ready for as many workers as there are places for, and plans these.

        Raises:
            HostsError: a host is lost, or cannot be used.
            PlanError: a host has not the cores or GPUs that were asked for.
        """
        asked, slots = self._asked, self._asked.slots(reached)
        options = replace(asked.options, workers=min(restart.workers, sum(slots.values())))
        places = places_of.place(options, slots)
        addresses = reached.prepare({name: len(tasks) for name, tasks in places.items()}, check)
        of_run = (asked.command, asked.environ, asked.reach.run_id, asked.reach.log_dir, asked.show_all)
        of_hosts = (options, places, reached.machines, addresses)
        return reached, places_of.plan_hosts(*of_hosts, *of_run, restart=restart.number)

    def _reach_again(self, restart: Restart, check: Callable[[], object]) -> _Prepared:
        """Connects to the hosts once more; waits for those that do not answer, unless it goes without them.

        Raises:
            HostsError: not all have come.
        """
        asked, deadline, pause = self._asked, time.monotonic() + self._patience.start_timeout, _FIRST_PAUSE
        while True:
            reached = Reached.reach(asked.listed, asked.reach, restart.number, check)
            slots = asked.slots(reached)
            count = sum(slots.values())
            problems = "; ".join([*reached.problems.values(), *self._shrunk(slots)])
            try:
                if count >= asked.fewest:
                    prepared = self._prepared(reached, restart, check)
                    if count < restart.workers:
                        self._say(f"{problems}; going on with {count} of {restart.workers} workers")
                    return prepared
            except BaseException as error:
                reached.close()
                problems = "; ".join(one.lost for one in reached.connections.values() if one.lost)
                if not isinstance(error, HostsError) or not problems:
                    raise
            reached.close()
            if time.monotonic() > deadline:
                raise HostsError(problems)
            if pause == _FIRST_PAUSE:
                self._say(f"{problems}; trying again for {self._patience.start_timeout:g} s")
            end = min(time.monotonic() + pause, deadline)
            while time.monotonic() < end:
                check()
                time.sleep(_TICK)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look_for_room(self) -> Future[int]:
        """Tries to reach the hosts that are missing, in a thread: ssh may take its time."""
        found, here, asked = Future[int](), sum(self._here.values()), self._asked
        missing = [host for host in asked.listed if host.name not in self._here]

        def look() -> None:
            room = here
            try:
                with contextlib.suppress(OSError), Reached.reach(missing, asked.reach) as reached:
                    room += sum(asked.slots(reached).values())
            finally:  # whatever has happened: it goes on with the hosts that it has
                found.set_result(room)

        threading.Thread(target=look, name="tfdist-look-for-room", daemon=True).start()
        return found

    def _shrunk(self, slots: Mapping[str, int]) -> Iterator[str]:
        """Which hosts have not the places any more that they had at first: those of GPUs, say."""
        for name, count in slots.items():
            if count < self._slots[name]:
                yield f"host {name} has {counted(count, 'place')} now, and had {self._slots[name]}"

    def _say(self, text: str) -> None:
        """Says something about the restart under way."""
        self.terminal.message(f"{self._recovery.name}: {text}" if self._recovery else text)


def _check(*inboxes: SignalInbox) -> None:
    """Raises _Interrupted if somebody has asked this process to end."""
    for inbox in inboxes:
        if (number := inbox.take_stop()) is not None:
            raise _Interrupted(number)


def _listed(hosts: str | None, hostfile: str | None) -> list[ListedHost]:
    if hosts is not None and hostfile is not None:
        raise ListError(f"--hosts {hosts} and --hostfile {hostfile}: expected only one of them.")
    if hosts is not None:
        return parse_hosts(hosts)
    assert hostfile is not None
    try:
        return parse_hostfile(Path(hostfile).read_text("utf-8-sig", "replace"), hostfile)
    except OSError as error:
        raise ListError(
            f"--hostfile {hostfile}: {error.strerror}. Expected: a file with a host on each line."
        ) from None


def _words(ssh: str) -> list[str]:
    try:
        words = shlex.split(ssh)
    except ValueError:
        words = []
    if not words:
        raise PlanError(f"--ssh {ssh!r}: expected a command, such as 'ssh -F my_config'.")
    return words


def _check_count(count: int, slots: Mapping[str, int], asked: str, option: str) -> None:
    most = sum(slots.values())
    if count > most:
        there = ", ".join(f"{name}:{number}" for name, number in slots.items())
        raise PlanError(
            f"{asked}: {count} processes, but {option} has places for {most} ({there}). Ask for fewer, or name more "
            "hosts, or more places: HOST:8."
        )


def _notices(options: RunOptions, places: places_of.Places, reached: Reached) -> Iterator[str]:
    """What the user should know before it starts."""
    named: dict[str, str] = {}
    for name, connection in reached.connections.items():
        other = named.setdefault(connection.identity, name)
        if other != name:
            yield f"{other} and {name} are the same machine: its cores and GPUs are given away twice; name it once"
    for name, tasks in places.items():
        machine = reached.machines[name]
        if shares_gpus(options, machine, tasks):
            yield f"{len(machine.gpus)} GPU(s) of {cleaned(name, 100)} are shared by its {len(tasks)} processes"


def _working_folder() -> str:
    """As the user has come here: the path behind a link may be another one on other hosts."""
    typed = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if os.path.isabs(typed) and os.path.samefile(typed, "."):
            return typed
    return os.getcwd()


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A folder, which is taken away again if nothing was written there."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
