"""Variables that list all processes of the job as JSON: TFDIST_CLUSTER, TF_CONFIG, CLUSTER_SPEC and SM_HOSTS."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tfdist.cluster import validation
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.variables import text

_OWN, _TF_CONFIG, _SPEC = "TFDIST_CLUSTER", "TF_CONFIG", "CLUSTER_SPEC"
# The jobs that Vertex AI's pools are.
_JOBS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}


def read_tfdist_cluster(env: Mapping[str, str]) -> ClusterConfig:
    """Reads TFDIST_CLUSTER, which `tfdist run` sets for each process, beside TF_CONFIG and equal to it.

    Raises:
        ClusterError: If it does not describe a cluster, or TF_CONFIG describes another one.

    Example:
        >>> value = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        >>> read_tfdist_cluster({"TFDIST_CLUSTER": value}).address
        'a:1'
    """
    config = ClusterConfig.from_tf_config(env[_OWN], _OWN)
    if text(env, _TF_CONFIG):
        other = read_tf_config(env)
        if other != config:
            raise ClusterError(
                f"{_OWN} and {_TF_CONFIG} disagree: {_OWN} says {config}; {_TF_CONFIG} says {other}. "
                f"`tfdist run` sets both: do not change {_TF_CONFIG} in the script, or unset {_OWN}"
            )
    return config


def read_tf_config(env: Mapping[str, str]) -> ClusterConfig:
    """Reads TF_CONFIG, TensorFlow's own variable, set by hand or by an orchestrator such as Kubeflow.

    Raises:
        ClusterError: If it does not describe a cluster.

    Example:
        >>> read_tf_config({"TF_CONFIG": "{}"}).is_single_process
        True
    """
    return ClusterConfig.from_tf_config(env[_TF_CONFIG], _TF_CONFIG)


def read_cluster_spec(env: Mapping[str, str]) -> ClusterConfig:
    """Reads CLUSTER_SPEC, which Google's Vertex AI sets where it sets no TF_CONFIG; the first pool is the chief.

    Raises:
        ClusterError: If it does not describe a cluster.

    Example:
        >>> spec = '{"cluster": {"workerpool0": ["a:2222"]}, "task": {"type": "workerpool0", "index": 0}}'
        >>> read_cluster_spec({"CLUSTER_SPEC": spec}).address
        'a:2222'
    """
    content = validation.parse(env[_SPEC], _SPEC)
    cluster, task = content.get("cluster"), content.get("task")
    if not isinstance(cluster, Mapping) or not isinstance(task, Mapping):
        raise ClusterError(f'{_SPEC}: "cluster" or "task" is missing')
    jobs = {_JOBS.get(pool, pool): addresses for pool, addresses in cluster.items() if pool != "workerpool3"}
    own = str(task.get("type"))
    return ClusterConfig(jobs, _JOBS.get(own, own), task.get("index", 0), _SPEC)  # type: ignore[arg-type]


def read_sagemaker(env: Mapping[str, str]) -> Membership:
    """The position of the own host in Amazon SageMaker's SM_HOSTS, a list that is the same on all hosts.

    Each host has one process.

    Raises:
        ClusterError: If it is no list, or this host is not in it.

    Example:
        >>> str(read_sagemaker({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}))
        'rank 1 of 2, from SageMaker'
    """
    try:
        hosts = json.loads(env["SM_HOSTS"])
    except json.JSONDecodeError:
        hosts = None
    own = env["SM_CURRENT_HOST"]
    if not isinstance(hosts, list) or own not in hosts:
        raise ClusterError(f"SM_HOSTS is {env['SM_HOSTS']!r}; expected a JSON list with SM_CURRENT_HOST, {own!r}")
    return Membership(
        rank=hosts.index(own),
        size=len(hosts),
        source="SageMaker",
        job=f"sagemaker-{env.get('TRAINING_JOB_NAME', '')}",
        host=hosts[0],
        local_rank=0,
        local_size=1,
        own_name=own,
    )
