"""Which process runs on which host. Pure functions only."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tfdist.launcher.failure import counted
from tfdist.launcher.hosts.connection import Facts
from tfdist.launcher.hosts.listing import ListedHost
from tfdist.launcher.machine import Machine
from tfdist.launcher.run_plan import (
    PlanError,
    ProcessPlan,
    RunOptions,
    Task,
    default_workers,
    jobs_of,
    plan_tasks,
    share_cpus,
    share_gpus,
)

Places = dict[str, list[Task]]
_SHOWN = 8


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
    are dealt out to the hosts in turn; an evaluator is where there is room, or else on the last host.

    Args:
        options: what was asked for; it is known to fit.
        slots: how many processes that compute each host may have.

    Example:
        >>> place(RunOptions(workers=3, evaluator=True), {"a": 2, "b": 2, "c": 2})
        {'a': [('worker', 0), ('worker', 1)], 'b': [('worker', 2), ('evaluator', 0)]}
    """
    free = [host for host, count in slots.items() for _ in range(count)]
    host_of = dict(zip(options.tasks_with_devices, free, strict=False))
    used = list(dict.fromkeys(host_of.values()))
    turns = itertools.cycle(used)
    for task in options.tasks:
        if task[0] == "ps":
            host_of[task] = next(turns)
        elif task[0] == "evaluator":
            has_room = next((host for host in used if sum(one == host for one in host_of.values()) < slots[host]), "")
            host_of[task] = has_room or used[-1]
        else:
            host_of.setdefault(task, used[0])
    places: Places = {host: [] for host in used}
    for task in options.tasks:
        places[host_of[task]].append(task)
    return places


def check_places(options: RunOptions, places: Places, facts: Mapping[str, Facts]) -> None:
    """Makes sure that each host has the cores and GPUs that were asked for.

    Raises:
        PlanError: it has not.
    """
    for host, tasks in places.items():
        with _named(host):
            for share in (share_cpus, share_gpus):
                share(options, facts[host].machine, tasks)


def plan_hosts(
    options: RunOptions,
    places: Places,
    facts: Mapping[str, Facts],
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
        facts: what the hosts have.
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
    left = {host: iter(addresses[host]) for host in places}
    address_of = {task: next(left[host]) for host, task in _tasks(places) if task in options.tasks_with_port}
    jobs = jobs_of(options, [address_of[task] for task in options.tasks_with_port])
    plans: list[ProcessPlan] = []
    of_run = (jobs, environ, run_id, log_dir, show_all, restart)
    for host, tasks in places.items():
        with _named(host):
            plans += plan_tasks(options, tasks, command, facts[host].machine, *of_run, host=host)
    order = {task: position for position, task in enumerate(options.tasks)}
    return sorted(plans, key=lambda plan: order[(plan.job, plan.index)])


def ports_needed(options: RunOptions, places: Places) -> dict[str, int]:
    """How many ports each host has to reserve."""
    return {host: sum(task in options.tasks_with_port for task in tasks) for host, tasks in places.items()}


def described(places: Places) -> str:
    """Where what runs, for people.

    Example:
        >>> described({"a": [("worker", 0), ("worker", 1)], "b": [("worker", 2)]})
        '2 hosts (a: worker 0 and 1; b: worker 2)'
    """
    texts = []
    for host, tasks in list(places.items())[:_SHOWN]:
        jobs = {job: [index for own, index in tasks if own == job] for job, _ in tasks}
        texts.append(f"{host}: {', '.join(f'{job} {_numbers(indices)}' for job, indices in jobs.items())}")
    if len(places) > _SHOWN:
        texts.append(f"and {len(places) - _SHOWN} more")
    return f"{counted(len(places), 'host')} ({'; '.join(texts)})"


def _numbers(indices: Sequence[int]) -> str:
    if len(indices) > 2 and indices[-1] - indices[0] == len(indices) - 1:
        return f"{indices[0]} to {indices[-1]}"
    return " and ".join(map(str, indices)) if len(indices) < 3 else ", ".join(map(str, indices))


def _tasks(places: Places) -> Iterator[tuple[str, Task]]:
    return ((host, task) for host, tasks in places.items() for task in tasks)


@contextmanager
def _named(host: str) -> Iterator[None]:
    """Names the host that has not what was asked for."""
    try:
        yield
    except PlanError as error:
        raise PlanError(f"{error} (host {host})") from None
