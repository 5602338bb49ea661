"""TF_CONFIG: TensorFlow's own variable, set by hand or by an orchestrator such as Kubeflow."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.config import ClusterConfig

NAME = "TF_CONFIG"


def detect(env: Mapping[str, str]) -> bool:
    """Whether TF_CONFIG has a value; one that is blank matters only where nothing else tells of a cluster."""
    return bool(env.get(NAME, "").strip())


def read(env: Mapping[str, str]) -> ClusterConfig:
    """Reads TF_CONFIG.

    Raises:
        ClusterError: If it does not describe a cluster.

    Example:
        >>> read({"TF_CONFIG": "{}"}).is_single_process
        True
    """
    return ClusterConfig.from_tf_config(env[NAME], NAME)
