"""`tfdist run --hosts` from its options to the exit code."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.variables import TOKEN, text, travelling
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.hosts import places as places_of
from tfdist.launcher.hosts.connection import HostsError, Reach, Reached
from tfdist.launcher.hosts.group import HostsGroup
from tfdist.launcher.hosts.places import ListedHost, parse_hostfile, parse_hosts
from tfdist.launcher.operating_system import Interrupted, SignalInbox
from tfdist.launcher.output import Terminal, hidden_lines
from tfdist.launcher.plan import PlanError, ProcessPlan, RunOptions, shares, shares_gpus
from tfdist.launcher.policy import Restart, RestartPolicy, counted, exit_code
from tfdist.launcher.process import ProcessGroup
from tfdist.launcher.supervisor import Ending, Patience, TrainingRun, announcement
from tfdist.supervision.exit_codes import HOST_LOST

# Hosts, and what is to run there.
_Prepared = tuple[Reached, list[ProcessPlan]]
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 15.0


def run_on_hosts(
    hosts: str | None,
    hostfile: str | None,
    ssh: str,
    remote_python: str | None,
    options: RunOptions,
    fewest: int | None,
    most: int | None,
    command: Sequence[str],
    run_id: str,
    folder: Path,
    shown_folder: Path,
    show_all: bool,
    policy: RestartPolicy,
    patience: Patience,
) -> int:
    """Runs a program as a cluster on several hosts and returns the exit code.

    Args:
        hosts: the option --hosts.
        hostfile: the option --hostfile.
        ssh: how to call ssh.
        remote_python: Python of the other hosts; None: the path of this one.
        options: what was asked for, but for the number of workers.
        fewest: with how few workers to go on; None: with all.
        most: with how many to begin; None: as many as there are places for.
        command: what each process runs.
        run_id: name of the run.
        folder: that of the logs.
        shown_folder: the same for people.
        show_all: whether all output goes to the terminal.
        policy: decides about restarts.
        patience: how long to wait for what.

    Raises:
        PlanError: the options ask for something that is not there.
        HostsError: a host cannot be reached, or used.
        OSError: the logs cannot be written.
    """
    listed = _listed(hosts, hostfile)
    variables = travelling(os.environ)
    reach = Reach(tuple(_words(ssh)), remote_python, _working_folder(), run_id, str(folder), variables)
    # Who is on the network of the hosts must not be able to take the place of a process.
    token = {} if text({**variables, **options.env}, TOKEN) else {TOKEN: secrets.token_hex(16)}
    with _made(folder), SignalInbox() as inbox:
        try:
            first = Reached.reach(listed, reach, check=inbox.check)
        except Interrupted as stop:
            print(f"tfdist: {stop} received: not started", file=sys.stderr)
            return exit_code(-stop.signal)
        with first:
            if first.problems:
                raise HostsError("\ntfdist: ".join(first.problems.values()))
            slots = _slots(first, options)
            options = replace(options, workers=sum(slots.values()) if most is None else most)
            _check_count(options, slots, "--hosts" if hosts is not None else "--hostfile")
            places = places_of.place(options, slots)
            for name, tasks in places.items():
                shares(options, first.machines[name], tasks)
            has_driver = any(machine.gpus for machine in first.machines.values())
            hidden = hidden_lines(show_all, {**os.environ, **options.env}, has_driver)
            terminal = Terminal.standard(live="{} {}".format(*options.tasks[0]), env=os.environ, hidden=hidden)
            terminal.message(announcement(options, str(shown_folder), show_all, places_of.described(places)))
            for text_ in _notices(options, places, first):
                terminal.message(text_)
            plan = functools.partial(
                places_of.plan_hosts,
                command=command,
                environ={**variables, **token},
                run_id=run_id,
                log_dir=str(folder),
                show_all=show_all,
            )
            return HostsRun(
                options, fewest or options.workers, listed, reach, plan, first, policy, shown_folder, terminal, patience
            ).run(inbox)


class HostsRun(TrainingRun):
    """Runs a cluster on several hosts.

    Args:
        options: what was asked for.
        fewest: with how few workers to go on.
        listed: the hosts.
        reach: how they are reached.
        plan: `plan_hosts` with all that is the same in each attempt.
        first: the hosts of the first attempt.
        policy: decides about restarts.
        log_dir: folder of the logs; it exists.
        terminal: where output and messages go.
        patience: how long to wait for what.
    """

    def __init__(
        self,
        options: RunOptions,
        fewest: int,
        listed: Sequence[ListedHost],
        reach: Reach,
        plan: Callable[..., list[ProcessPlan]],
        first: Reached,
        policy: RestartPolicy,
        log_dir: Path,
        terminal: Terminal,
        patience: Patience,
    ) -> None:
        super().__init__(options.workers, policy, log_dir, terminal, patience)
        self._options, self._fewest, self._plan = options, fewest, plan
        self._listed, self._reach = listed, reach
        self._slots = _slots(first, options)
        self._first: Reached | None = first
        self._here: dict[str, int] = {}

    def _attempt(self, restart: Restart, inbox: SignalInbox, guardian: Guardian) -> Ending:
        try:
            return super()._attempt(restart, inbox, guardian)
        except Interrupted as stop:
            self.terminal.message(f"{stop} received: not started")
            return Ending(exit_code(-stop.signal), interrupt=stop.signal)
        except (HostsError, PlanError) as error:
            is_lost = restart.number > 0 and isinstance(error, HostsError)
            return Ending(HOST_LOST if is_lost else 1, error=str(error))

    @contextmanager
    def _started(self, restart: Restart, inbox: SignalInbox, guardian: Guardian) -> Iterator[ProcessGroup]:
        first, self._first = self._first, None
        reached, plans = self._prepared(first, restart, inbox) if first else self._reach_again(restart, inbox)
        with reached, HostsGroup(plans, self._log_dir, self.terminal, guardian, restart.number, reached) as group:
            self._here = _slots(reached, self._options)
            yield group

    def _prepared(self, reached: Reached, restart: Restart, inbox: SignalInbox) -> _Prepared:
        """Makes hosts ready for as many workers as there are places for, and plans these.

        Raises:
            HostsError: a host is lost, or cannot be used.
            PlanError: a host has not the cores or GPUs that were asked for.
        """
        slots = _slots(reached, self._options)
        options = replace(self._options, workers=min(restart.workers, sum(slots.values())))
        places = places_of.place(options, slots)
        addresses = reached.prepare({name: len(tasks) for name, tasks in places.items()}, inbox.check)
        return reached, self._plan(options, places, reached.machines, addresses, restart=restart.number)

    def _reach_again(self, restart: Restart, inbox: SignalInbox) -> _Prepared:
        """Connects to the hosts once more; waits for those that do not answer, unless it goes without them.

        Raises:
            HostsError: not all have come.
        """
        deadline, pause = time.monotonic() + self._patience.start_timeout, _FIRST_PAUSE
        while True:
            reached = Reached.reach(self._listed, self._reach, restart.number, inbox.check)
            slots = _slots(reached, self._options)
            count = sum(slots.values())
            # Those of GPUs, say.
            fewer = [(name, had) for name, had in self._slots.items() if slots.get(name, had) < had]
            shrunk = [f"host {name} has {counted(slots[name], 'place')} now, and had {had}" for name, had in fewer]
            problems = "; ".join([*reached.problems.values(), *shrunk])
            try:
                if count >= self._fewest:
                    prepared = self._prepared(reached, restart, inbox)
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
            inbox.wait(min(pause, deadline - time.monotonic()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _look_for_room(self) -> Future[int]:
        """Tries to reach the hosts that are missing, in a thread: ssh may take its time."""
        found, here = Future[int](), sum(self._here.values())
        missing = [host for host in self._listed if host.name not in self._here]

        def look() -> None:
            room = here
            try:
                with contextlib.suppress(OSError), Reached.reach(missing, self._reach) as reached:
                    room += sum(_slots(reached, self._options).values())
            finally:  # whatever has happened: it goes on with the hosts that it has
                found.set_result(room)

        threading.Thread(target=look, name="tfdist-look-for-room", daemon=True).start()
        return found

    def _say(self, text: str) -> None:
        """Says something about the restart under way."""
        self.terminal.message(f"{self._recovery.name}: {text}" if self._recovery else text)


def _slots(reached: Reached, options: RunOptions) -> dict[str, int]:
    """How many processes each of the hosts may have."""
    return {
        name: places_of.slots_of(reached.connections[name].host, machine, options.gpus_per_worker)
        for name, machine in reached.machines.items()
    }


def _listed(hosts: str | None, hostfile: str | None) -> list[ListedHost]:
    if hosts is not None and hostfile is not None:
        raise PlanError(f"--hosts {hosts} and --hostfile {hostfile}: expected only one of them.")
    if hosts is not None:
        return parse_hosts(hosts)
    assert hostfile is not None
    try:
        return parse_hostfile(Path(hostfile).read_text("utf-8-sig", "replace"), hostfile)
    except OSError as error:
        raise PlanError(
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


def _check_count(options: RunOptions, slots: Mapping[str, int], option: str) -> None:
    count, most = options.workers, sum(slots.values())
    if count > most:
        asked = f"--stages {options.stages.stages}" if options.stages else f"-n {count}"
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
            yield f"on {cleaned(name, 100)}, {len(tasks)} processes share {counted(len(machine.gpus), 'GPU')}"


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
