"""Open MPI's mpirun (versions 4 and 5), and IBM Spectrum MPI, which derives from it.

Inside of a Slurm allocation, the ranks see the SLURM_PROCID of mpirun's daemons: this one is asked before Slurm.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.environments.variables import number, optional_number
from tfdist.cluster.membership import Membership

NAME = "Open MPI"
_RANK, _SIZE = "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"


def detect(env: Mapping[str, str]) -> bool:
    """Whether mpirun has started this process."""
    return _RANK in env and _SIZE in env


def read(env: Mapping[str, str]) -> Membership:
    """Rank and size; where rank 0 is, the ranks tell each other by PMIx.

    Raises:
        ClusterError: if a number is none.

    Example:
        >>> str(read({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "77"}))
        'rank 0 of 2, from Open MPI'
    """
    return Membership(
        rank=number(env, _RANK),
        size=number(env, _SIZE),
        source=NAME,
        job=f"open-mpi-{env.get('PMIX_NAMESPACE') or env.get('OMPI_MCA_orte_hnp_uri', '')}",
        channel="pmix",
        local_rank=optional_number(env, "OMPI_COMM_WORLD_LOCAL_RANK"),
        local_size=optional_number(env, "OMPI_COMM_WORLD_LOCAL_SIZE"),
    )
