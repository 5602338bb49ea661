"""MVAPICH2's mpirun_rsh; started by Hydra's mpiexec or by Slurm, MVAPICH looks like these."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.environments.variables import number, optional_number
from tfdist.cluster.membership import Membership

NAME = "MVAPICH2"
_RANK, _SIZE = "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"


def detect(env: Mapping[str, str]) -> bool:
    """Whether mpirun_rsh has started this process."""
    return _RANK in env and _SIZE in env


def read(env: Mapping[str, str]) -> Membership:
    """Rank and size.

    Raises:
        ClusterError: if a number is none.

    Example:
        >>> str(read({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}))
        'rank 1 of 2, from MVAPICH2'
    """
    return Membership(
        rank=number(env, _RANK),
        size=number(env, _SIZE),
        source=NAME,
        job=f"mvapich-{env.get('MPIRUN_ID', '')}",
        channel="pmi" if "PMI_FD" in env else None,
        local_rank=optional_number(env, "MV2_COMM_WORLD_LOCAL_RANK"),
        local_size=optional_number(env, "MV2_COMM_WORLD_LOCAL_SIZE"),
        shared_home=True,
    )
