"""The cluster of a `ParameterServerStrategy`: finds it, and lets the coordinator wait for its servers."""

from __future__ import annotations

import logging

import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover
from tfdist.cluster.errors import ClusterError
from tfdist.runtime import servers
from tfdist.runtime.server_process import say
from tfdist.strategies.validation import check_not_tuned

_START = "`tfdist run -n 2 --ps 1 train.py` starts a chief, two workers and a parameter server on this machine"


def find(cluster: ClusterConfig | None, start_timeout: float) -> ClusterConfig:
    """The cluster that was given, or is discovered.

    Raises:
        ClusterError: if it has no chief, worker or parameter server.
    """
    config = discover(timeout=start_timeout) if cluster is None else cluster
    if config.is_single_process:
        raise ClusterError(
            f"Received: no cluster ({config.source}). Expected: a chief, workers and parameter servers (jobs chief, "
            f"worker and ps in TF_CONFIG). {_START}."
        )
    check_not_tuned("ParameterServerStrategy", config)
    missing = [job for job in ("chief", "worker", "ps") if job not in config.jobs]
    if missing:
        raise ClusterError(
            f"Received: a cluster without {' and '.join(missing)}: {config}. Expected: a chief, which runs the "
            f"program, at least one worker, which computes, and at least one ps, which holds variables. {_START}."
        )
    if config.task_type == "evaluator":
        raise ClusterError(
            f"Received: task evaluator {config.task_index}. Expected: chief, worker or ps; an evaluator works by "
            "itself: let it build and evaluate the model without a strategy."
        )
    return config


def await_servers(config: ClusterConfig, start_timeout: float) -> None:
    """Waits in the coordinator until all others serve; from then on prints a line when one is gone or back.

    Raises:
        ClusterError: if one does not come.
    """

    def report_gone(job: str, index: int) -> None:
        name = _name(config, job, index)
        if job == "ps":
            say(servers.gone(name, "variables", servers.log_of(job, index)))
        else:
            say(f"{name} is gone; another worker does its step, and the training goes on without it until it is back")

    def report_back(job: str, index: int) -> None:
        say(f"{_name(config, job, index)} is back")

    servers.await_servers(config, start_timeout, report_gone, report_back)
    tf.get_logger().addFilter(_keep_message)


def resolver(config: ClusterConfig) -> tf.distribute.cluster_resolver.ClusterResolver:
    """The cluster in the form that TensorFlow's strategy takes."""
    spec = tf.train.ClusterSpec({job: dict(tasks) for job, tasks in config.jobs.items() if job != "evaluator"})
    return tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0, rpc_layer="grpc")


def _keep_message(record: logging.LogRecord) -> bool:
    """Drops TensorFlow's message about a lost worker, several lines long: `report_gone` prints one line."""
    return not str(record.msg).startswith("Worker %s failed with")


def _name(config: ClusterConfig, job: str, index: int) -> str:
    return f"{job} {index} ({config.jobs[job][index]})"
