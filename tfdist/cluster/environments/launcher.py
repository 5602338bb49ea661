"""TFDIST_CLUSTER: set, next to TF_CONFIG and equal to it, by `tfdist run` for each process that it starts."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments import tf_config
from tfdist.cluster.errors import ClusterError

NAME = "TFDIST_CLUSTER"


def detect(env: Mapping[str, str]) -> bool:
    """Whether TFDIST_CLUSTER has a value."""
    return bool(env.get(NAME, "").strip())


def read(env: Mapping[str, str]) -> ClusterConfig:
    """Reads TFDIST_CLUSTER.

    Raises:
        ClusterError: If it does not describe a cluster, or TF_CONFIG describes another one.

    Example:
        >>> read({"TFDIST_CLUSTER": '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'}).address
        'a:1'
    """
    config = ClusterConfig.from_tf_config(env[NAME], NAME)
    if tf_config.detect(env):
        other = tf_config.read(env)
        if other != config:
            raise ClusterError(
                f"{NAME} and {tf_config.NAME} disagree: {NAME} says {config}; {tf_config.NAME} says {other}. "
                f"`tfdist run` sets both: do not change {tf_config.NAME} in the script, or unset {NAME}"
            )
    return config
