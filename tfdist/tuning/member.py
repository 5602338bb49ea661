"""Which part of a search a process is, and what each process on this machine gets. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.variables import RUN_ID
from tfdist.launcher.plan import Machine, PlanError, ProcessPlan, RunOptions, shared_out

# Holds the JSON of a `Member` in the environment of each process.
VARIABLE = "TFDIST_TUNE"
# Ends a process whose tuner is to be started again, and goes on then: EX_TEMPFAIL of sysexits.h.
START_AGAIN = 75
# KerasTuner's own way to run several tuners, which this replaces.
_OF_KERAS_TUNER = ("KERASTUNER_ORACLE_IP", "KERASTUNER_ORACLE_PORT", "KERASTUNER_TUNER_ID")


@dataclass(frozen=True)
class Member:
    """A process of a search.

    Attributes:
        tuner: which tuner it is, from 0. Tuner 0 begins each search, and goes on behind it.
        tuners: how many there are.
        search_id: names the whole search, over all starts.
        folder: of the logs; all processes have to see it.
        max_restarts: how often a trial is tried again whose tuner was killed.
        trial_timeout: seconds that a trial may take; None: as long as it likes.

    Example:
        >>> member = Member(1, 2, "s", "/logs", 3)
        >>> Member.of_process({VARIABLE: member.to_json()}) == member, Member.of_process({}), member.name, member.id
        (True, None, 'tuner 1', 'tuner1')
    """

    tuner: int
    tuners: int
    search_id: str
    folder: str
    max_restarts: int
    trial_timeout: float | None = None

    @classmethod
    def of_process(cls, env: Mapping[str, str]) -> Member | None:
        """The member that a process with this environment is; None outside of a search."""
        text = env.get(VARIABLE)
        return cls(**json.loads(text)) if text else None

    def to_json(self) -> str:
        """The value of the variable."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def name(self) -> str:
        """For people."""
        return f"tuner {self.tuner}"

    @property
    def id(self) -> str:
        """By which KerasTuner knows the tuner."""
        return f"tuner{self.tuner}"


def plan_tuners(
    here: Sequence[int],
    shares: RunOptions,
    command: Sequence[str],
    machine: Machine,
    environ: Mapping[str, str],
    member: Member,
    show_all: bool = False,
) -> dict[int, ProcessPlan]:
    """Works out the process of each tuner on this machine.

    Args:
        here: which tuners those are.
        shares: a run of so many workers, among which the machine is shared out.
        command: the argument vector that every process runs.
        machine: what there is to share out.
        environ: the launcher's own environment, passed on.
        member: any of the processes.
        show_all: whether the output of all goes to the terminal, not only that of the first.

    Raises:
        PlanError: there are not as many cores or GPUs as asked for.

    Example:
        >>> member = Member(0, 2, "s", "/logs", 3)
        >>> plans = plan_tuners((0, 1), RunOptions(2), ["python", "s.py"], Machine((0, 1)), {}, member)
        >>> [(plan.name, plan.cpus) for plan in plans.values()]
        [('tuner 0', (0,)), ('tuner 1', (1,))]
    """
    if contradicted := {*_OF_KERAS_TUNER, VARIABLE} & {*shares.env}:
        raise PlanError(f"--env {contradicted.pop()}=...: tfdist tune sets it for every process itself. Leave it out.")
    inherited = {name: value for name, value in environ.items() if name not in _OF_KERAS_TUNER}
    plans = {}
    for (pinned, shared), tuner in zip(shared_out(shares, machine, inherited).values(), here, strict=True):
        own = dataclasses.replace(member, tuner=tuner)
        env = {
            **shared,
            # It would ask Slurm, say, who the others are.
            "TFDIST_CLUSTER": ClusterConfig.single_process("tfdist tune").to_json(),
            RUN_ID: f"{member.search_id}-{tuner}",
            "TFDIST_LOG_DIR": member.folder,
            "KERASTUNER_TUNER_ID": own.id,
            VARIABLE: own.to_json(),
        }
        plans[tuner] = ProcessPlan("tuner", tuner, tuple(command), env, pinned, show_all or tuner == here[0])
    return plans
