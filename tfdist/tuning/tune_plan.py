"""The processes of a search on this machine, and what each of them gets. Pure functions only."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.variables import RUN_ID
from tfdist.cluster.variables import TRANSPORT_VARIABLE as TRANSPORT
from tfdist.launcher.arguments import AUTO
from tfdist.launcher.machine import Machine
from tfdist.launcher.run_plan import (
    OF_CLUSTER,
    RESERVED,
    STAGE_VARIABLES,
    PlanError,
    ProcessPlan,
    RunOptions,
    runtime_defaults,
    share_cpus,
    share_gpus,
    shares_gpus,
)
from tfdist.tuning.member import VARIABLE, Member, id_of, name_of

# KerasTuner's own way to run several tuners, which this replaces.
_OF_KERAS_TUNER = ("KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT", "KERASTUNER_TUNER_ID")


@dataclass(frozen=True)
class TuneOptions:
    """What the user asked for on the command line of `tfdist tune`.

    Attributes:
        tuners: how many there are in all.
        here: which of them are on this machine.
        workers_per_trial: processes of each.
        cpus_per_worker: cores of each process.
        gpus_per_worker: GPUs of each process.
        env: additional environment variables.
        transport: what carries the sums between the processes of a trial.
    """

    tuners: int
    here: tuple[int, ...]
    workers_per_trial: int = 1
    cpus_per_worker: int | str = AUTO
    gpus_per_worker: int | str = AUTO
    env: Mapping[str, str] = field(default_factory=dict)
    transport: str = AUTO

    def __post_init__(self) -> None:
        for name in (*RESERVED, *_OF_KERAS_TUNER, VARIABLE):
            if name in self.env:
                raise PlanError(f"--env {name}=...: tfdist tune sets {name} for every process itself. Leave it out.")

    @property
    def processes(self) -> int:
        """How many there are on this machine."""
        return len(self.here) * self.workers_per_trial

    @property
    def sharing(self) -> RunOptions:
        """A run of so many workers, among which a machine is shared out."""
        each = {"cpus_per_worker": self.cpus_per_worker, "gpus_per_worker": self.gpus_per_worker}
        return RunOptions(workers=self.processes, **each)


def plan_tuners(
    options: TuneOptions,
    command: Sequence[str],
    machine: Machine,
    ports: Sequence[int],
    environ: Mapping[str, str],
    first: Member,
    show_all: bool = False,
) -> dict[int, list[ProcessPlan]]:
    """Works out the processes of each tuner on this machine.

    Args:
        options: what was asked for.
        command: the argument vector that every process runs.
        machine: what there is to share out.
        ports: one for each process; none where each trial has one process.
        environ: the launcher's own environment, passed on.
        first: the first process of tuner 0.
        show_all: whether the output of all goes to the terminal, not only that of the first.

    Raises:
        PlanError: there are not as many cores or GPUs as asked for.

    Example:
        >>> first = Member(0, 0, 2, 1, "a", "s", "/logs", 3, True)
        >>> plans = plan_tuners(TuneOptions(2, (0, 1)), ["python", "s.py"], Machine((0, 1)), [], {}, first)
        >>> [(plan.name, plan.cpus) for plan in plans[0] + plans[1]]
        [('tuner 0', (0,)), ('tuner 1', (1,))]
    """
    run = options.sharing
    cpus, gpus = share_cpus(run, machine), share_gpus(run, machine)
    shared_gpus = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} if shares_gpus(run, machine) else {}
    not_inherited = (*OF_CLUSTER, *STAGE_VARIABLES, *_OF_KERAS_TUNER)
    inherited = {name: value for name, value in environ.items() if name not in not_inherited}
    each = options.workers_per_trial
    plans: dict[int, list[ProcessPlan]] = {tuner: [] for tuner in options.here}
    for position in range(options.processes):
        task = ("worker", position)
        tuner, rank = options.here[position // each], position % each
        job, index = (f"{id_of(tuner)}-worker", rank) if each > 1 else ("tuner", tuner)
        member = dataclasses.replace(first, tuner=tuner, rank=rank, process=f"{job} {index}")
        pinned = cpus.get(task, ())
        of_tuner = ports[position - rank : position - rank + each]
        env = {
            **runtime_defaults(len(pinned), len(machine.cores), ps_cluster=False),
            **shared_gpus,
            **inherited,
            "PYTHONUNBUFFERED": "1",
            **({"CUDA_VISIBLE_DEVICES": ",".join(gpus[task])} if task in gpus else {}),
            **options.env,
            **_cluster(of_tuner, rank),
            RUN_ID: f"{first.search_id}-{tuner}",
            "TFDIST_LOG_DIR": first.folder,
            "KERASTUNER_TUNER_ID": id_of(tuner),
            TRANSPORT: options.transport,
            VARIABLE: member.to_json(),
        }
        shown = show_all or position == 0
        plans[tuner].append(ProcessPlan(job, index, tuple(command), env, pinned, shown))
    return plans


def announcement(options: TuneOptions, log_dir: str) -> str:
    """The line at the start.

    Example:
        >>> announcement(TuneOptions(4, (0, 1, 2, 3), workers_per_trial=2), "logs")
        '4 tuners on this machine, with 2 processes each; logs in logs/'
        >>> announcement(TuneOptions(4, (2,)), "logs")
        'tuner 2 of 4; logs in logs/'
    """
    each = f", with {options.workers_per_trial} processes each" if options.workers_per_trial > 1 else ""
    count = len(options.here)
    what = f"{count} tuner{'' if count == 1 else 's'} on this machine"
    if count < options.tuners:
        what = f"{name_of(options.here[0])} of {options.tuners}"
    return f"{what}{each}; logs in {log_dir}/"


def _cluster(ports: Sequence[int], rank: int) -> dict[str, str]:
    """The cluster of a tuner's processes. A process alone is told so: it would ask Slurm, say, who the others are."""
    jobs = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    config = (ClusterConfig(jobs, "worker", rank) if ports else ClusterConfig.single_process("tfdist tune")).to_json()
    return {"TFDIST_CLUSTER": config, **({"TF_CONFIG": config} if ports else {})}
