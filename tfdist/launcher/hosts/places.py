"""Which hosts the user names, --hosts a:8,b:8 or a host file, and which process runs on which of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster.foreign_text import cleaned
from tfdist.launcher.plan import (
    Machine,
    PlanError,
    ProcessPlan,
    RunOptions,
    Task,
    default_workers,
    jobs_of,
    plan_run,
)
from tfdist.launcher.policy import counted

# Nothing that could be taken for an option of ssh, or by a shell for something else.
_WORD = r"[\w.%][\w.%-]*"
_NAME = rf"(?:{_WORD}@)?(?:\[[0-9A-Fa-f:.%\w]+\]|{_WORD})"
_HOST = re.compile(rf"(?P<name>{_NAME})(?::(?P<slots>\d+))?")
# Of Open MPI's host files: another way to write node-1:8, and what does not say how many processes to start.
_SLOTS = re.compile(r"\s+slots\s*=\s*(\d+)$")
_IGNORED = re.compile(r"\s+max[-_]slots\s*=\s*\d+(?!\S)")
_SHOWN = 200


@dataclass(frozen=True)
class ListedHost:
    """A host as the user names it.

    Attributes:
        name: what ssh takes: a name, an address or an alias of ~/.ssh/config, perhaps behind "user@".
        slots: how many processes it may have; None: as many as it has GPUs.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> list[ListedHost]:
    """Reads the value of --hosts.

    Raises:
        PlanError: it is no list of hosts.

    Example:
        >>> parse_hosts("a:8,me@b")
        [ListedHost(name='a', slots=8), ListedHost(name='me@b', slots=None)]
    """
    words, where = [word.strip() for word in text.split(",")], f"--hosts {cleaned(text, _SHOWN)}"
    return _merged((_host(word, word, where) for word in words if word), where)


def parse_hostfile(text: str, path: str) -> list[ListedHost]:
    """Reads a host file: lines such as `node-1`, `node-1:8` or `node-1 slots=8`. What follows a # is a comment.

    A host without a number that stands on several lines has a process for each, as in $PBS_NODEFILE.

    Raises:
        PlanError: a line is something else.

    Example:
        >>> parse_hostfile("a slots=2  # the first\\n\\nb:4\\n", "hosts.txt")
        [ListedHost(name='a', slots=2), ListedHost(name='b', slots=4)]
    """
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), start=1))
    return _merged(
        (
            _host(_SLOTS.sub(r":\1", _IGNORED.sub("", line)), line, f"--hostfile {path}, line {number}")
            for number, line in lines
            if line
        ),
        path,
    )


def _host(word: str, typed: str, where: str) -> ListedHost:
    match = _HOST.fullmatch(word)
    if match is None:
        raise PlanError(
            f"{where}: {typed[:_SHOWN]!r} is no host. Expected: the name of a host as ssh takes it, of letters, digits "
            "and _ . - %, and how many processes it may have: node-1:8, me@node-1:8 or [2001:db8::1]:8; in a file also "
            "node-1 slots=8."
        )
    slots = None if match["slots"] is None else int(match["slots"][:9])
    if slots == 0:
        raise PlanError(f"{where}: {typed[:_SHOWN]!r} has no process. Expected: at least 1, or leave the host out.")
    return ListedHost(match["name"].replace("[", "").replace("]", ""), slots)


def _merged(hosts: Iterable[ListedHost], where: str) -> list[ListedHost]:
    """Each host once: one that is named several times has the sum."""
    found: dict[str, list[int | None]] = {}
    for host in hosts:
        found.setdefault(host.name, []).append(host.slots)
    if not found:
        raise PlanError(f"{where}: it names no host. Expected: one at least, such as node-1:8.")
    for name, slots in found.items():
        if None in slots and any(slots):
            raise PlanError(
                f"{where}: {name} stands there with and without a number of processes. Expected: once, such as "
                f"{name}:8."
            )
    # Without numbers, each mention is a place.
    return [
        ListedHost(name, None if slots == [None] else sum(1 if one is None else one for one in slots))
        for name, slots in found.items()
    ]


Places = dict[str, list[Task]]
_HOSTS_SHOWN = 8


def slots_of(listed: ListedHost, machine: Machine, gpus_per_worker: int | str) -> int:
    """How many processes a host may have that compute: as many as the user says, or as it has GPUs for; else one.

    Example:
        >>> machine = Machine((0, 1), ("0", "1", "2", "3"))
        >>> slots_of(ListedHost("a"), machine, 2), slots_of(ListedHost("a"), Machine((0,)), "auto")
        (2, 1)
    """
    if listed.slots is not None:
        return listed.slots
    return default_workers(machine, gpus_per_worker, without_gpus=1)


def place(options: RunOptions, slots: Mapping[str, int]) -> Places:
    """The processes of each host that has any, the host of rank 0 first.

    Those that compute fill one host after the other. A chief that only drives is on the first host; parameter servers
    are dealt out to the hosts in turn.

    Args:
        options: what was asked for; it is known to fit.
        slots: how many processes that compute each host may have.

    Example:
        >>> place(RunOptions(workers=3), {"a": 2, "b": 2, "c": 2})
        {'a': [('worker', 0), ('worker', 1)], 'b': [('worker', 2)]}
    """
    free = [host for host, count in slots.items() for _ in range(count)]
    host_of = dict(zip(options.tasks_with_devices, free, strict=False))
    used = list(dict.fromkeys(host_of.values()))
    turns = itertools.cycle(used)
    for task in options.tasks:
        if task[0] == "ps":
            host_of[task] = next(turns)
        else:
            host_of.setdefault(task, used[0])
    places: Places = {host: [] for host in used}
    for task in options.tasks:
        places[host_of[task]].append(task)
    return places


def plan_hosts(
    options: RunOptions,
    places: Places,
    machines: Mapping[str, Machine],
    addresses: Mapping[str, Sequence[str]],
    command: Sequence[str],
    environ: Mapping[str, str],
    run_id: str,
    log_dir: str,
    show_all: bool = False,
    restart: int = 0,
) -> list[ProcessPlan]:
    """Works out every process of a run.

    Args:
        options: what was asked for.
        places: see `place`.
        machines: what the hosts have.
        addresses: of each host, one for each of its processes that the others connect to.
        command: the argument vector that every process runs.
        environ: variables that all of them get.
        run_id: name of the run.
        log_dir: absolute folder of the logs.
        show_all: whether all output goes to the terminal, not only that of rank 0.
        restart: how often the run has been started again.

    Raises:
        PlanError: a host has not the cores or GPUs that were asked for.
    """
    address_of = {
        task: address for host, tasks in places.items() for task, address in zip(tasks, addresses[host], strict=True)
    }
    jobs = jobs_of(options, [address_of[task] for task in options.tasks])
    plans = [
        plan
        for host, tasks in places.items()
        for plan in plan_run(options, command, machines[host], jobs, environ, run_id, log_dir, show_all, restart, tasks)
    ]
    order = {task: position for position, task in enumerate(options.tasks)}
    return sorted(plans, key=lambda plan: order[(plan.job, plan.index)])


def described(places: Places) -> str:
    """Where what runs, for people.

    Example:
        >>> described({"a": [("worker", 0), ("worker", 1)], "b": [("worker", 2)]})
        '2 hosts (a: worker 0 and 1; b: worker 2)'
    """
    texts = []
    for host, tasks in list(places.items())[:_HOSTS_SHOWN]:
        jobs = {job: [index for own, index in tasks if own == job] for job, _ in tasks}
        texts.append(f"{host}: {', '.join(f'{job} {_numbers(indices)}' for job, indices in jobs.items())}")
    if len(places) > _HOSTS_SHOWN:
        texts.append(f"and {len(places) - _HOSTS_SHOWN} more")
    return f"{counted(len(places), 'host')} ({'; '.join(texts)})"


def _numbers(indices: Sequence[int]) -> str:
    if len(indices) > 2 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]} to {indices[-1]}"
    return " and ".join(map(str, indices)) if len(indices) < 3 else ", ".join(map(str, indices))
