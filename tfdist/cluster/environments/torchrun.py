"""PyTorch's torchrun, in whatever it is started by: one torchrun on each host, several processes by each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdist.cluster.environments import rank_variables
from tfdist.cluster.membership import Membership

NAME = "torchrun"


def detect(env: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in env and rank_variables.detect(env)


def read(env: Mapping[str, str]) -> Membership:
    """Rank, size, and the host of rank 0.

    Raises:
        ClusterError: if a number is none.

    Example:
        >>> env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1", "TORCHELASTIC_RUN_ID": "none"}
        >>> str(read(env))
        'rank 1 of 2, from torchrun'
    """
    found = rank_variables.read(env, NAME)
    # TORCHELASTIC_RESTART_COUNT is not the same on all hosts.
    return dataclasses.replace(found, job=f"{found.job}-{env['TORCHELASTIC_RUN_ID']}")
