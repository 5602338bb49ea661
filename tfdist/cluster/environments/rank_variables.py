"""RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT: PyTorch's convention, set by hand or by Kubeflow's PyTorchJob."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.environments.variables import number, optional_number
from tfdist.cluster.membership import Membership

NAME = "RANK and WORLD_SIZE"
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")


def detect(env: Mapping[str, str]) -> bool:
    """Whether rank, size and the host of rank 0 are given."""
    return all(env.get(name, "").strip() for name in _NEEDED)


def read(env: Mapping[str, str], source: str = NAME) -> Membership:
    """Rank, size, and the host of rank 0.

    MASTER_PORT only tells jobs from one another: who sets it may listen there.

    Args:
        env: the environment variables.
        source: who has set them, for messages.

    Raises:
        ClusterError: if a number is none.

    Example:
        >>> read({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}).host
        'node-1'
    """
    return Membership(
        rank=number(env, "RANK"),
        size=number(env, "WORLD_SIZE"),
        source=source,
        job=f"ranks-{env.get('MASTER_PORT', '')}",  # MASTER_ADDR may be "localhost" on the host of rank 0
        host=env["MASTER_ADDR"].strip(),
        local_rank=optional_number(env, "LOCAL_RANK"),
        local_size=optional_number(env, "LOCAL_WORLD_SIZE"),
    )
