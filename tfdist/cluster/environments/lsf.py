"""IBM LSF with jsrun (JSM): the variables of each rank. LSF without jsrun has no ranks, see `allocation`."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.environments.variables import number, optional_number
from tfdist.cluster.membership import Membership

NAME = "LSF's jsrun"


def detect(env: Mapping[str, str]) -> bool:
    """Whether jsrun has started this process."""
    return "JSM_NAMESPACE_RANK" in env and "JSM_NAMESPACE_SIZE" in env


def read(env: Mapping[str, str]) -> Membership:
    """Rank and size; where rank 0 is, the ranks tell each other by PMIx.

    Raises:
        ClusterError: if a number is none.

    Example:
        >>> str(read({"JSM_NAMESPACE_RANK": "2", "JSM_NAMESPACE_SIZE": "4", "LSB_JOBID": "7"}))
        "rank 2 of 4, from LSF's jsrun"
    """
    return Membership(
        rank=number(env, "JSM_NAMESPACE_RANK"),
        size=number(env, "JSM_NAMESPACE_SIZE"),
        source=NAME,
        job=f"lsf-{env.get('LSB_JOBID', '')}-{env.get('PMIX_NAMESPACE', '')}",
        channel="pmix",
        local_rank=optional_number(env, "JSM_NAMESPACE_LOCAL_RANK"),
        local_size=optional_number(env, "JSM_NAMESPACE_LOCAL_SIZE"),
    )
