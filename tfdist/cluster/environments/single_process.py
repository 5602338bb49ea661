"""No cluster: what is left when no other environment is found."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig

NAME = "single process"


def detect(env: Mapping[str, str]) -> bool:
    """Always true."""
    return True


def read(env: Mapping[str, str]) -> ClusterConfig:
    """The configuration without a cluster.

    Example:
        >>> read({}).num_workers
        1
    """
    return ClusterConfig.single_process(NAME)
