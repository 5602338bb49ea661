"""No cluster: what is left when no other environment is found."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments.incomplete import incomplete
from tfdist.cluster.errors import ClusterError

NAME = "single process"


def detect(env: Mapping[str, str]) -> bool:
    """Always true."""
    return True


def read(env: Mapping[str, str]) -> ClusterConfig:
    """The configuration without a cluster.

    Raises:
        ClusterError: if TFDIST_SIZE, WORLD_SIZE or TFDIST_PS says that there is one.

    Example:
        >>> read({}).num_workers
        1
    """
    problems = incomplete(env)
    if problems:
        raise ClusterError(problems)
    return ClusterConfig.single_process(NAME)
