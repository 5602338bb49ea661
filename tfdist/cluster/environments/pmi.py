"""MPICH's mpiexec (Hydra), Intel MPI's, and whatever else tells by PMI_RANK and PMI_SIZE."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.environments import slurm
from tfdist.cluster.environments.variables import number, optional_number
from tfdist.cluster.membership import Membership

NAME = "MPICH"


def detect(env: Mapping[str, str]) -> bool:
    """Whether mpiexec has started this process; `srun --mpi=pmi2` sets the variables, too."""
    return "PMI_RANK" in env and "PMI_SIZE" in env and not slurm.has_started(env)


def read(env: Mapping[str, str]) -> Membership:
    """Rank and size; where rank 0 is, the ranks tell each other by PMI.

    Raises:
        ClusterError: if a number is none.

    Example:
        >>> str(read({"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "5"}))
        'rank 1 of 2, from MPICH'
    """
    return Membership(
        rank=number(env, "PMI_RANK"),
        size=number(env, "PMI_SIZE"),
        source="Intel MPI" if "I_MPI_ROOT" in env or "I_MPI_HYDRA_BOOTSTRAP" in env else NAME,
        job="pmi",  # nothing tells one from another on all hosts
        channel="pmi",
        local_rank=optional_number(env, "MPI_LOCALRANKID"),
        local_size=optional_number(env, "MPI_LOCALNRANKS"),
    )
