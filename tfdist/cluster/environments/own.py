"""TFDIST_RANK and TFDIST_SIZE: set by whoever starts the processes with a tool that tfdist does not know."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.environments.variables import number, optional_number
from tfdist.cluster.membership import Membership

NAME = "TFDIST_RANK"


def detect(env: Mapping[str, str]) -> bool:
    """Whether the rank is given."""
    return bool(env.get(NAME, "").strip())


def read(env: Mapping[str, str]) -> Membership:
    """Reads TFDIST_RANK, TFDIST_SIZE, TFDIST_LOCAL_RANK and TFDIST_LOCAL_SIZE.

    Raises:
        ClusterError: if the size is missing, or a number is none.

    Example:
        >>> str(read({"TFDIST_RANK": "1", "TFDIST_SIZE": "2", "TFDIST_MEETING": "node-1"}))
        'rank 1 of 2, from TFDIST_RANK'
    """
    return Membership(
        rank=number(env, NAME),
        size=number(env, "TFDIST_SIZE"),
        source=NAME,
        job="",
        local_rank=optional_number(env, "TFDIST_LOCAL_RANK"),
        local_size=optional_number(env, "TFDIST_LOCAL_SIZE"),
    )
