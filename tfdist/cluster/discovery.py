"""Finding the cluster that this process belongs to."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments import ENVIRONMENTS


def discover(env: Mapping[str, str] | None = None) -> ClusterConfig:
    """Reads the first environment that is present: the launcher's, TF_CONFIG, else a single process.

    Args:
        env: The environment variables; those of this process by default.

    Raises:
        ClusterError: If the environment describes no valid cluster.

    Example:
        >>> discover({}).is_single_process
        True
    """
    env = os.environ if env is None else env
    return next(environment.read(env) for environment in ENVIRONMENTS if environment.detect(env))
