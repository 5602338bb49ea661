"""What a machine offers to a run, which processes there are, and what each of them gets of it."""

from __future__ import annotations

import ipaddress
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from tfdist import __version__
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.gpus import visible_gpus
from tfdist.cluster.variables import HOROVOD, RUN_ID
from tfdist.cluster.variables import TRANSPORT_VARIABLE as TRANSPORT
from tfdist.launcher.arguments import AUTO, STAGE_VARIABLES, PlanError, Stages
from tfdist.supervision.progress import VARIABLE as PROGRESS


@dataclass(frozen=True)
class Machine:
    """The cores that this process may run on and the GPUs that it may see.

    Attributes:
        cores: numbers of the usable cores, ascending.
        gpus: what `CUDA_VISIBLE_DEVICES` calls each visible GPU.
        host: what the user calls the machine, if it is another one.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()
    host: str = ""

    @classmethod
    def this_one(cls, env: Mapping[str, str] | None = None) -> Machine:
        """Looks at the machine that the caller runs on.

        Example:
            >>> len(Machine.this_one({"CUDA_VISIBLE_DEVICES": "0,1"}).gpus)
            2
        """
        return cls(usable_cores(), visible_gpus(os.environ if env is None else env))


def usable_cores() -> tuple[int, ...]:
    """The cores of this process's affinity mask: a container or `taskset` may allow fewer than there are."""
    return tuple(sorted(os.sched_getaffinity(0)))


def public_addresses() -> tuple[str, ...]:
    """The addresses of this machine at which anyone in the Internet could reach it, unless a firewall is in between."""
    # Its import takes longer than everything else here.
    import psutil

    found = (address.address.partition("%")[0] for all_ in psutil.net_if_addrs().values() for address in all_)
    return tuple(sorted({text for text in found if _is_public(text)}))


def _is_public(text: str) -> bool:
    """Whether this is an IP address that is neither private nor local.

    Example:
        >>> [_is_public(text) for text in ("8.8.8.8", "10.0.0.1", "127.0.0.1", "100.64.0.1", "2600::1", "00:16:3e:01")]
        [True, False, False, False, True, False]
    """
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False  # that of an Ethernet card, say


def versions() -> dict[str, str]:
    """Versions by name, of the platform, Python and the packages.

    Example:
        >>> sorted(versions())
        ['keras', 'numpy', 'platform', 'python', 'tensorflow', 'tfdist']
    """
    found = {"tfdist": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for package in ("tensorflow", "keras", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


# What TensorFlow is to print, unless the user says it.
LOG_LEVEL, QUIET = "TF_CPP_MIN_LOG_LEVEL", "2"

# Number of the replacement, in the environment of a worker that was started in the place of another one.
REPLACEMENT = "TFDIST_REPLACEMENT"

Task = tuple[str, int]

# The cluster of a launcher around this one.
OF_CLUSTER = ("TF_CONFIG", "TFDIST_CLUSTER")
# What the launcher itself tells every process; a value from --env would make the processes disagree.
RESERVED = (
    *(*OF_CLUSTER, RUN_ID, "TFDIST_LOG_DIR", "TFDIST_RESTART", TRANSPORT),
    *(REPLACEMENT, *STAGE_VARIABLES, PROGRESS),
)

_REMEDIES = {
    "TFDIST_LOG_DIR": "Use --log-dir.",
    TRANSPORT: "Use --transport.",
    **dict.fromkeys(STAGE_VARIABLES, "Use --stages and --replicas."),
}


def default_workers(machine: Machine, gpus_per_worker: int | str, without_gpus: int = 2) -> int:
    """With how many workers to train where nobody says it: as many as there are GPUs for, or so many without GPUs.

    Example:
        >>> default_workers(Machine((0, 1), ("0", "1", "2", "3")), AUTO), default_workers(Machine((0, 1)), AUTO)
        (4, 2)
    """
    each = 1 if gpus_per_worker == AUTO else int(gpus_per_worker)
    return (len(machine.gpus) // each if each else 0) or without_gpus


@dataclass(frozen=True)
class RunOptions:
    """What the user asked for on the command line of `tfdist run`."""

    workers: int = 2
    ps: int = 0
    chief: bool = False
    cpus_per_worker: int | str = AUTO
    gpus_per_worker: int | str = AUTO
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    stages: Stages | None = None
    transport: str = AUTO
    replace_workers: bool = False

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise PlanError(f"--workers {self.workers}: expected at least 1. Use -n 1 for a cluster of one process.")
        if self.ps < 0:
            raise PlanError(f"--ps {self.ps}: expected 0 or more. Leave --ps out for a cluster without one.")
        if self.ps and self.chief:
            raise PlanError(
                f"--chief and --ps {self.ps}: expected only one of them. "
                "With parameter servers a chief is started anyway, which drives the workers: leave --chief out."
            )
        if self.replace_workers and (self.ps or self.stages or self.transport == HOROVOD):
            other = "--ps" if self.ps else "--stages" if self.stages else f"--transport {self.transport}"
            raise PlanError(
                f"--replace-workers and {other}: expected only one of them. --replace-workers is for workers that come "
                "and go, tfdist.LocalStepsStrategy(min_workers=...)."
            )
        if self.transport == HOROVOD and (self.ps or self.stages):
            raise PlanError(
                f"--transport {self.transport} and {'--ps' if self.ps else '--stages'}: expected only one of them. "
                "Horovod connects processes that train copies of one model: leave --transport out."
            )
        for name in RESERVED:
            if name in self.env:
                remedy = _REMEDIES.get(name, "Leave it out.")
                raise PlanError(f"--env {name}=...: tfdist run sets {name} for every process itself. {remedy}")

    @property
    def compute_tasks(self) -> tuple[Task, ...]:
        """The processes that train, the one with rank 0 first."""
        if self.ps:
            return (("chief", 0), *(("worker", index) for index in range(self.workers)))
        if self.chief:
            return (("chief", 0), *(("worker", index) for index in range(self.workers - 1)))
        return tuple(("worker", index) for index in range(self.workers))

    @property
    def tasks_with_devices(self) -> tuple[Task, ...]:
        """The processes that compute, which get the cores and GPUs: a chief of parameter servers only drives."""
        return self.compute_tasks[1:] if self.ps else self.compute_tasks

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All processes."""
        return (*self.compute_tasks, *(("ps", index) for index in range(self.ps)))


@dataclass(frozen=True)
class ProcessPlan:
    """One process of a run.

    Attributes:
        job: "chief", "worker" or "ps".
        index: position in the job.
        command: argument vector.
        env: the complete environment.
        cpus: cores to pin the process to; empty = not pinned.
        shown: whether its output also goes to the terminal.
        serves: whether it only works for the first process: it reports no progress, and ends when that one has ended.
        is_replaceable: whether the others go on without it, and with another one in its place.
        host: where it runs, as the user calls it; empty = on this machine.
    """

    job: str
    index: int
    command: tuple[str, ...]
    env: Mapping[str, str]
    cpus: tuple[int, ...] = ()
    shown: bool = False
    serves: bool = False
    is_replaceable: bool = False
    host: str = ""

    @property
    def name(self) -> str:
        """For people: "worker 1"."""
        return f"{self.job} {self.index}"

    @property
    def log_name(self) -> str:
        """File name of its log: "worker-1.log"."""
        return f"{self.job}-{self.index}.log"


def plan_run(
    options: RunOptions,
    command: Sequence[str],
    machine: Machine,
    jobs: Mapping[str, Sequence[str]],
    environ: Mapping[str, str],
    run_id: str,
    log_dir: str,
    show_all: bool = False,
    restart: int = 0,
    tasks: Sequence[Task] | None = None,
) -> list[ProcessPlan]:
    """Works out the processes of a run that share a machine.

    Args:
        options: what was asked for.
        command: the argument vector that every process runs.
        machine: what there is to share out among them.
        jobs: the addresses of all processes, as `jobs_of` has them.
        environ: variables that they get.
        run_id: name of the run, the same in every process.
        log_dir: absolute folder of the logs.
        show_all: whether all output goes to the terminal, not only that of rank 0.
        restart: how often the run has been started again.
        tasks: those of `options.tasks` that run there; by default all.

    Raises:
        PlanError: there are not as many cores or GPUs as asked for.

    Example:
        >>> jobs = jobs_of(RunOptions(), ["127.0.0.1:20001", "127.0.0.1:20002"])
        >>> plans = plan_run(RunOptions(), ["python", "t.py"], Machine((0, 1)), jobs, {}, "r", "/tmp/l")
        >>> [(plan.name, plan.cpus) for plan in plans]
        [('worker 0', (0,)), ('worker 1', (1,))]
    """
    plans = []
    for task, (pinned, env) in shared_out(options, machine, environ, tasks).items():
        config = ClusterConfig(jobs=jobs, task_type=task[0], task_index=task[1]).to_json()
        own = {
            "TF_CONFIG": config,
            "TFDIST_CLUSTER": config,
            RUN_ID: run_id,
            "TFDIST_LOG_DIR": log_dir,
            "TFDIST_RESTART": str(restart),
            **(options.stages.environment() if options.stages else {}),
            TRANSPORT: options.transport,
            REPLACEMENT: "",
            PROGRESS: "",  # whoever starts the process fills it in; that of a launcher around this one is not ours
        }
        first = task == options.compute_tasks[0]
        serves = (options.stages is not None or options.ps > 0) and not first
        replaceable = task[0] == "worker" if options.ps else options.replace_workers and not first
        of_it = tuple(command), {**env, **own}, pinned, show_all or first, serves, replaceable, machine.host
        plans.append(ProcessPlan(*task, *of_it))
    return plans


def shared_out(
    options: RunOptions, machine: Machine, environ: Mapping[str, str], tasks: Sequence[Task] | None = None
) -> dict[Task, tuple[tuple[int, ...], dict[str, str]]]:
    """What each process gets of a machine: the cores to pin it to, if any, and its environment without its cluster.

    Args:
        options: what was asked for.
        machine: what there is to share out.
        environ: variables that all get.
        tasks: who shares it; by default all.

    Raises:
        PlanError: there are not as many cores or GPUs as asked for.
    """
    cpus, gpus = shares(options, machine, tasks)
    growth = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} if shares_gpus(options, machine, tasks) else {}
    # The cluster and the stages of a launcher around this one are not ours.
    inherited = {name: value for name, value in environ.items() if name not in (*OF_CLUSTER, *STAGE_VARIABLES)}
    found = {}
    for task in options.tasks if tasks is None else tasks:
        pinned = cpus.get(task, ())
        env = {
            **runtime_defaults(len(pinned), len(machine.cores), ps_cluster=options.ps > 0),
            **growth,
            **inherited,
            "PYTHONUNBUFFERED": "1",
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus[task])} if task in gpus else {}),
            **options.env,
        }
        found[task] = pinned, env
    return found


def shares(
    options: RunOptions, machine: Machine, tasks: Sequence[Task] | None = None
) -> tuple[dict[Task, tuple[int, ...]], dict[Task, tuple[str, ...]]]:
    """Cores and GPUs of the processes of a machine. Those that compute get equal disjoint parts.

    Args:
        options: what was asked for.
        machine: what there is to share out.
        tasks: who shares it; by default all.

    Returns:
        The cores of each process that is to be pinned; the others roam. And the GPUs of each process, if the machine
        has any, or some were asked for: none for parameter servers and their chief. With `auto` and fewer GPUs than
        processes that compute, these share them in turn.

    Raises:
        PlanError: there are not as many cores or GPUs as asked for.
    """
    everybody, cores, gpus = options.tasks if tasks is None else tasks, machine.cores, machine.gpus
    computing, cpus = _computing(options, everybody), {}
    if options.cpus_per_worker != AUTO or 1 < len(computing) <= len(cores):
        there = f"{'is' if len(cores) == 1 else 'are'} usable here"
        cpus = _shares("--cpus-per-worker", options.cpus_per_worker, computing, cores, "cores", there, machine.host)
    if options.gpus_per_worker == AUTO and not gpus:
        return cpus, {}
    if shares_gpus(options, machine, everybody):
        found = {task: (gpus[rank % len(gpus)],) for rank, task in enumerate(computing)}
    else:
        there = f"{'was' if len(gpus) == 1 else 'were'} found (CUDA_VISIBLE_DEVICES or nvidia-smi -L)"
        found = _shares("--gpus-per-worker", options.gpus_per_worker, computing, gpus, "GPUs", there, machine.host)
    return cpus, {**dict.fromkeys(everybody, ()), **found}


def _shares(
    option: str, asked: int | str, tasks: Sequence[Task], things: Sequence[Any], what: str, there: str, host: str
) -> dict[Task, Any]:
    """Equal disjoint parts of the cores or GPUs of a machine."""
    each = len(things) // max(len(tasks), 1) if asked == AUTO else int(asked)
    if each * len(tasks) > len(things):
        raise PlanError(
            f"{option} {each}: {len(tasks)} processes need {each * len(tasks)} {what}, but {len(things)} {there}. Ask "
            f"for fewer, or use {option} auto.{f' (host {host})' if host else ''}"
        )
    return {task: things[rank * each : (rank + 1) * each] for rank, task in enumerate(tasks)}


def shares_gpus(options: RunOptions, machine: Machine, tasks: Sequence[Task] | None = None) -> bool:
    """Whether several processes that compute have to use the same GPU."""
    return options.gpus_per_worker == AUTO and 0 < len(machine.gpus) < len(_computing(options, tasks))


def _computing(options: RunOptions, tasks: Sequence[Task] | None) -> list[Task]:
    return [task for task in options.tasks_with_devices if tasks is None or task in tasks]


def jobs_of(options: RunOptions, addresses: Sequence[str]) -> dict[str, list[str]]:
    """The addresses by job, of one for each entry of `options.tasks`.

    Example:
        >>> jobs_of(RunOptions(workers=1, ps=1), ["a:1", "b:2", "a:3"])
        {'chief': ['a:1'], 'worker': ['b:2'], 'ps': ['a:3']}
    """
    jobs: dict[str, list[str]] = {}
    for (job, _), address in zip(options.tasks, addresses, strict=True):
        jobs.setdefault(job, []).append(address)
    return jobs


def runtime_defaults(pinned: int, usable: int, ps_cluster: bool) -> dict[str, str]:
    """Settings of a process that a user's own value overrides.

    Args:
        pinned: how many cores it has for itself; 0 if it is not pinned.
        usable: how many cores there are.
        ps_cluster: whether there are parameter servers.
    """
    # At least 2: a collective waits inside one inter-op thread while another goes on computing; with a single one
    # nothing could run meanwhile, not even what the collective waits for. 4 where there are parameter servers, which
    # answer their clients on those threads, too.
    interop = max(pinned or usable, 4 if ps_cluster else 2)
    defaults = {
        "TF_NUM_INTEROP_THREADS": str(interop),
        LOG_LEVEL: QUIET,
        # glibc returns free pages at the top of the heap to the kernel; the buffers of an all-reduce would be given
        # back and faulted in again at every step. This keeps 64 MiB of them.
        "MALLOC_TOP_PAD_": "67108864",
    }
    if pinned:
        defaults["TF_NUM_INTRAOP_THREADS"] = defaults["OMP_NUM_THREADS"] = str(pinned)
    return defaults
