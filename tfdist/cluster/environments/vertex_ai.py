"""Google's Vertex AI where it gives CLUSTER_SPEC without TF_CONFIG: worker pools, the first one of them the chief."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster import parsing
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError

NAME = "CLUSTER_SPEC"
# What the pools are in jobs that TensorFlow knows.
_JOBS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}


def detect(env: Mapping[str, str]) -> bool:
    """Whether Vertex AI has started this process."""
    return bool(env.get(NAME, "").strip()) and "CLOUD_ML_PROJECT_ID" in env


def read(env: Mapping[str, str]) -> ClusterConfig:
    """Reads CLUSTER_SPEC.

    Raises:
        ClusterError: if it does not describe a cluster.

    Example:
        >>> spec = '{"cluster": {"workerpool0": ["a:2222"]}, "task": {"type": "workerpool0", "index": 0}}'
        >>> read({"CLUSTER_SPEC": spec}).address
        'a:2222'
    """
    content, problems = parsing.parse(env[NAME], NAME)
    cluster, task = content.get("cluster"), content.get("task")
    if problems or not isinstance(cluster, Mapping) or not isinstance(task, Mapping):
        problems = problems or ['"cluster" or "task" is missing']
        raise ClusterError(f"{NAME}: {problem}" for problem in problems)
    jobs = {_JOBS.get(pool, pool): addresses for pool, addresses in cluster.items() if pool != "workerpool3"}
    own = str(task.get("type"))
    return ClusterConfig(jobs, _JOBS.get(own, own), task.get("index", 0), NAME)  # type: ignore[arg-type]
