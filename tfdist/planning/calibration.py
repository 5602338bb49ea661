"""Measures this machine, and keeps the result in the user's cache.

Two probes, of a device and of the links between several, run in other processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tfdist.atomic_files import write_atomically
from tfdist.cluster.membership import own_share
from tfdist.folders import user_cache
from tfdist.launcher.local.local_cluster import run_local
from tfdist.planning.hardware import Device, Hardware, Link, ring_bytes

_log = logging.getLogger("tfdist")
_SECONDS = 180.0
# Part of the names of the kept files: increase it when the meaning of a measurement changes.
_FORMAT = 6
_SIDE = 1024  # of the matrices
_NUMBERS = 1 << 22  # in a vector that is larger than the caches
_CHAIN, _ROUNDS = 200, 8
_SMALL, _LARGE = 256, 1 << 21  # numbers in a tensor that is summed over processes
_RUNS, _MANY_RUNS, _STEPS = 9, 100, 60
_LONG_ENOUGH = 0.6  # seconds
# What is measured in seconds or bytes that are taken: the slowest process has most of it. Of other values it has least.
_COSTS = ("operation", "reserved", "step", "latency")


def this_machine(processes: int | None = None, again: bool = False) -> Hardware:
    """How fast this machine is: as measured before, or measured now, which takes about half a minute.

    Its GPUs are measured if TensorFlow finds some, otherwise its cores: with one process alone, and with several at the
    same time, each with its share of the cores.

    Args:
        processes: how many; by default one for each GPU, or for each core, and at most 8.
        again: whether to measure even if there is an earlier measurement.

    Raises:
        tfdist.testing.LocalRunError: if a process of the measurement fails.
    """
    cores = sorted(os.sched_getaffinity(0))
    processes = min(processes or 8, count_gpus() or len(cores))
    path = Path(
        user_cache(os.environ),
        "machines",
        f"{platform.node()}-{len(cores)}-cores-{count_gpus()}-gpus-{processes}-processes-tensorflow-"
        f"{importlib.metadata.version('tensorflow')}-{_FORMAT}.json",
    )
    if not again:
        with contextlib.suppress(OSError, ValueError):
            return Hardware.from_json(path.read_text())
    _log.warning("Measuring this machine with 1 and %d processes; it should have nothing else to do.", processes)
    found = calibrate(cores, processes)
    with contextlib.suppress(OSError):  # what cannot be kept is measured again
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, found.to_json())
    return found


def calibrate(cores: Sequence[int], processes: int) -> Hardware:
    """Measures one process with all of these cores, and several processes with a share of them each.

    Raises:
        tfdist.testing.LocalRunError: if a process fails.
    """
    alone = _slowest(cores, 1)
    each = alone if processes == 1 else _slowest(cores, processes)
    devices = {
        count: Device(**{field.name: found[field.name] for field in dataclasses.fields(Device)})
        for count, found in ((1, alone), (processes, each))
    }
    link = Link(each["latency"], each["link"])
    name = f"{len(cores)} cores, of one process" + (f" or of {processes}" if processes > 1 else "")
    if gpus := count_gpus():
        name, devices = f"{processes} of {gpus} GPUs", {1: devices[1]}
    machine, kind = f"{platform.node()} ({name})", "GPU" if gpus else "CPU"
    # GPUs that were not measured are there, too: a strategy would take them unless it is given others.
    return Hardware(machine, kind, devices, gpus or processes, link, link, alone["step"], each["step"])


@functools.cache
def count_gpus() -> int:
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def _slowest(cores: Sequence[int], processes: int) -> Mapping[str, float]:
    """The slowest value of each measurement: a training step waits for the slowest process."""
    of_each = [own_share(cores, rank, processes) for rank in range(processes)]
    threads = {"TF_NUM_INTRAOP_THREADS": str(len(of_each[0])), "TF_NUM_INTEROP_THREADS": "2"}
    found = run_local(measure, workers=processes, args=(of_each,), timeout=_SECONDS, env=threads)
    return {name: (max if name in _COSTS else min)(one[name] for one in found) for name in found[0]}


def measure(cores: Sequence[Sequence[int]]) -> dict[str, float]:
    """Measures the device of this process and its link to the others. `cores` are those of each process."""
    import tfdist

    rank = tfdist.discover().rank
    os.sched_setaffinity(0, cores[rank])
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    if gpus and len(cores) > 1:
        tf.config.set_visible_devices(gpus[rank], "GPU")
    # The strategy has to be made before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()
    with tf.device("GPU:0" if gpus else "CPU:0"):
        found = _device_probe(tf, _memory(bool(gpus), len(cores)), bool(gpus))
    return {**found, **_link_probe(tf, strategy)}


def _device_probe(tf: Any, memory: int, is_gpu: bool) -> dict[str, float]:
    """What `Device` says of the current device."""
    from tfdist.memory.estimate import VIEWS
    from tfdist.planning.profile import cost_of

    matrix = tf.random.stateless_uniform([_SIDE, _SIDE], [0, 0])
    images = tf.random.stateless_uniform([32, 16, 16, 64], [0, 0])
    kernel = tf.random.stateless_uniform([3, 3, 64, 64], [0, 0])
    products = 2.0 * _SIDE**3 / _seconds(tf.function(lambda: tf.matmul(matrix, matrix)))
    convolved = _seconds(tf.function(lambda: tf.nn.conv2d(images, kernel, 1, "SAME")))
    # Measured here: all libraries are loaded, and the large vectors do not exist yet.
    reserved = memory // 20 if is_gpu else psutil.Process().memory_info().rss
    vector, few = tf.random.stateless_uniform([_NUMBERS], [0, 0]), tf.ones([4])

    @tf.function
    def elementwise(first: Any, factor: Any) -> Any:
        # Forward and backward: as in training, results are kept in between.
        with tf.GradientTape() as tape:
            tape.watch(first)
            value = first
            for _ in range(_ROUNDS):
                value = tf.nn.relu(value * factor + first)
        return tape.gradient(value, first)

    @tf.function
    def chain(first: Any, factor: Any) -> Any:
        # The factors are arguments: with constants, TensorFlow would fold or merge the products.
        for _ in range(_CHAIN):
            first = first * factor
        return first

    graph = elementwise.get_concrete_function(vector, vector).graph
    moved = cost_of([op for op in graph.get_operations() if op.type not in {"Placeholder", *VIEWS}]).bytes
    return {
        "flops": (products + 2.0 * 32 * 16 * 16 * 64 * 64 * 9 / convolved) / 2,
        "bandwidth": moved / _seconds(lambda: elementwise(vector, vector)),
        "operation": _seconds(lambda: chain(few, few)) / _CHAIN,
        "memory": memory,
        "reserved": reserved,
    }


def _link_probe(tf: Any, strategy: Any) -> dict[str, float]:
    """Seconds of a message between processes, its bytes a second, and seconds of a step of Keras beside the sums."""
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return {"latency": 1e-4, "link": 1e9, "step": _keras_step(strategy)}

    def summed(count: int) -> Callable[[], Any]:
        value = tf.ones([count])

        def on_replica() -> Any:
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

        return tf.function(lambda: strategy.run(on_replica))

    # All processes have to run the sums equally often: the number of runs must not depend on the time.
    small, whole = _durations(summed(_SMALL), 0.0, _MANY_RUNS), _durations(summed(_LARGE), 0.0)
    # In training several gradients are summed at a time; the shortest run is nearer to that than the usual one.
    seconds = max(min(whole) - min(small), 1e-6)
    usual = statistics.median(small)
    return {
        # A ring sends 2 (N - 1) messages one after the other.
        "latency": usual / (2 * (replicas - 1)),
        "link": ring_bytes(4 * _LARGE, replicas) / seconds,
        "step": max(_keras_step(strategy) - usual, 1e-5),
    }


def _keras_step(strategy: Any) -> float:
    """Seconds of a step of Keras in which almost nothing is computed."""
    import keras
    import numpy as np

    times: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: times.append(time.perf_counter()))
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
    rows = strategy.num_replicas_in_sync
    data = np.zeros((rows * _STEPS, 1), "float32")
    model.fit(data, data, batch_size=rows, epochs=2, verbose=0, shuffle=False, callbacks=[clock])
    return statistics.median(b - a for a, b in itertools.pairwise(times[-_STEPS:]))


def _memory(of_gpu: bool, processes: int) -> int:
    """Bytes of a GPU, or of each process' share of the machine; the limit of a container counts."""
    if of_gpu:
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        return int(said.split()[0]) * 1024 * 1024
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(Path(path).read_text()))
    return min(limits) // processes


def _seconds(run: Callable[[], Any]) -> float:
    """Median seconds of a run."""
    return statistics.median(_durations(run, _LONG_ENOUGH))


def _durations(run: Callable[[], Any], least: float, runs: int = _RUNS) -> list[float]:
    """Seconds of each run: of `runs` or more, until they take `least` seconds together. Two first runs do not count."""
    import tensorflow as tf

    durations: list[float] = []
    # Cores need a while to reach their full speed.
    while len(durations) < 2 + runs or sum(durations[2:]) < least:
        begin = time.perf_counter()
        # Devices compute asynchronously: reading one number waits for the result.
        for result in tf.nest.flatten(run()):
            tf.reshape(result, [-1])[0].numpy()
        durations.append(time.perf_counter() - begin)
    return durations[2:]
