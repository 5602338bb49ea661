"""How many threads a TensorFlow server needs in a cluster with parameter servers."""

from __future__ import annotations

import os

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2

# A step holds a thread until it is done, and what it waits for needs others: with a single one it waits for ever.
LEAST = 4
_BESIDE_STEPS = LEAST - 1
_VARIABLE = "TF_NUM_INTEROP_THREADS"


def given_threads() -> int | None:
    """The number of inter-op threads that the program or its environment asks for; `None` if neither does.

    Example:
        >>> given_threads() != 0
        True
    """
    configured = tf.config.threading.get_inter_op_parallelism_threads()
    variable = os.environ.get(_VARIABLE, "")
    return configured or (int(variable) if variable.isdigit() else 0) or None


def server_config(given: int | None, steps: int) -> config_pb2.ConfigProto:
    """A server's configuration with as many inter-op threads as were given, or as it needs.

    Args:
        given: what `given_threads` says; one a core otherwise.
        steps: how many steps there are at a time that use the server.

    Example:
        >>> server_config(2, 1).inter_op_parallelism_threads, server_config(2, 10).inter_op_parallelism_threads
        (4, 13)
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = given or cores
    return config_pb2.ConfigProto(inter_op_parallelism_threads=max(threads, _BESIDE_STEPS + steps))
