"""Launchers that set the rank and the number of processes in environment variables: a table, one row for each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping

from tfdist.cluster.environments import slurm
from tfdist.cluster.membership import Membership
from tfdist.cluster.variables import number, optional_number, text


@dataclasses.dataclass(frozen=True)
class Launcher:
    """One launcher and its variables.

    Attributes:
        name: For messages.
        rank: The variable with the rank of the process.
        size: The variable with the number of processes.
        local_rank: The variable with the rank among the processes of the host.
        local_size: The variable with the number of processes on the host.
        job: What tells its jobs apart and is the same on all hosts; `{A|B}` is the value of A, or of B if A has none.
        needs: The variables that have a value in its processes, by default those of rank and size; a blank one counts
            as not set.
        unless: Whether something else has set these variables.
        host: The variable with the host of rank 0.
        has_channel: Whether rank 0 tells the others its host by a channel: see `tfdist.cluster.rendezvous.channels`.
        shared_home: Whether the processes usually have the same home folder.

    Example:
        >>> env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "77"}
        >>> OPEN_MPI.detect(env), str(OPEN_MPI.read(env))
        (True, 'rank 0 of 2, from Open MPI')
        >>> RANK_VARIABLES.read({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}).host
        'node-1'
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str
    needs: tuple[str, ...] = ()
    unless: Callable[[Mapping[str, str]], bool] | None = None
    host: str | None = None
    has_channel: bool = False
    shared_home: bool = False

    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether it has started this process."""
        has_all = all(text(env, name) for name in self.needs or (self.rank, self.size))
        return has_all and (self.unless is None or not self.unless(env))

    def read(self, env: Mapping[str, str]) -> Membership:
        """Rank and size, and the host of rank 0 or how the processes can learn it.

        Raises:
            ClusterError: If a number is missing, or is none.
        """
        return Membership(
            rank=number(env, self.rank),
            size=number(env, self.size),
            source=self.name,
            job=re.sub(r"\{(.+?)\}", lambda found: _first_value(env, found[1].split("|")), self.job),
            host=text(env, self.host) if self.host else None,
            has_channel=self.has_channel,
            local_rank=optional_number(env, self.local_rank),
            local_size=optional_number(env, self.local_size),
            shared_home=self.shared_home,
        )


def _first_value(env: Mapping[str, str], names: list[str]) -> str:
    return next((env[name] for name in names if env.get(name)), "")


# Set beside the variables that tfdist itself sets for Horovod; its value is the port that is one of these.
SET_FOR_HOROVOD = "TFDIST_HOROVOD"
_GLOO_HOST, _GLOO_PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


def _set_by_tfdist(env: Mapping[str, str]) -> bool:
    """Whether tfdist.HorovodStrategy has set Horovod's variables, in this process or in one that has started it."""
    return SET_FOR_HOROVOD in env and env[SET_FOR_HOROVOD] == env.get(_GLOO_PORT)


# Set by hand, where a tool that tfdist does not know starts the processes.
BY_HAND = Launcher(
    "TFDIST_RANK",
    *("TFDIST_RANK", "TFDIST_SIZE", "TFDIST_LOCAL_RANK", "TFDIST_LOCAL_SIZE"),
    job="",
    needs=("TFDIST_RANK",),
)
# PyTorch's convention, set by hand or by Kubeflow's PyTorchJob. MASTER_PORT only tells jobs apart: who sets it may
# listen there. MASTER_ADDR may be "localhost" on the host of rank 0.
RANK_VARIABLES = Launcher(
    "RANK and WORLD_SIZE",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    job="ranks-{MASTER_PORT}",
    needs=("RANK", "WORLD_SIZE", "MASTER_ADDR"),
    host="MASTER_ADDR",
)
# One torchrun on each host, several processes by each. TORCHELASTIC_RESTART_COUNT is not the same on all hosts.
TORCHRUN = dataclasses.replace(
    RANK_VARIABLES,
    name="torchrun",
    job="ranks-{MASTER_PORT}-{TORCHELASTIC_RUN_ID}",
    needs=("TORCHELASTIC_RUN_ID", *RANK_VARIABLES.needs),
)
# TrainJobs of Kubeflow Trainer with the policy "torch", one process a pod. The variables are those that torchrun reads;
# PET_NPROC_PER_NODE is for torchrun alone, and often the number of cores.
KUBEFLOW_TRAINER = dataclasses.replace(
    RANK_VARIABLES,
    name="Kubeflow Trainer",
    rank="PET_NODE_RANK",
    size="PET_NNODES",
    job="trainjob-{PET_MASTER_ADDR}",
    needs=("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    host="PET_MASTER_ADDR",
)
# Horovod's launcher with Gloo. `tfdist.HorovodStrategy` is connected by Horovod itself.
HOROVODRUN = Launcher(
    "horovodrun",
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    job=f"horovod-{{{_GLOO_HOST}}}:{{{_GLOO_PORT}}}",
    unless=_set_by_tfdist,
    has_channel=True,
)
# Versions 4 and 5, and IBM Spectrum MPI, which derives from it. Inside of a Slurm allocation, the ranks see the
# SLURM_PROCID of mpirun's daemons.
OPEN_MPI = Launcher(
    "Open MPI",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    job="open-mpi-{PMIX_NAMESPACE|OMPI_MCA_orte_hnp_uri}",
    has_channel=True,
)
# mpirun_rsh; started by Hydra's mpiexec or by Slurm, MVAPICH looks like these.
MVAPICH = Launcher(
    "MVAPICH2",
    *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    job="mvapich-{MPIRUN_ID}",
    has_channel=True,
    shared_home=True,
)
# Hydra's mpiexec, and whatever else sets PMI_RANK and PMI_SIZE; `srun --mpi=pmi2` does, too. Nothing tells one job from
# another on all hosts.
MPICH = Launcher(
    "MPICH",
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    job="",
    unless=slurm.has_started,
    has_channel=True,
)
INTEL_MPI = tuple(
    dataclasses.replace(MPICH, name="Intel MPI", needs=("PMI_RANK", "PMI_SIZE", own))
    for own in ("I_MPI_ROOT", "I_MPI_HYDRA_BOOTSTRAP")
)
MPI = (OPEN_MPI, MVAPICH, *INTEL_MPI, MPICH)
# IBM LSF's launcher, by JSM. LSF without jsrun has no ranks, see `single_process`.
JSRUN = Launcher(
    "LSF's jsrun",
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    job="lsf-{LSB_JOBID}-{PMIX_NAMESPACE}",
    has_channel=True,
)
