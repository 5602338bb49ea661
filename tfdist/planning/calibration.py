"""Measures this machine, and keeps the result in the user's cache.

The measurements run in other processes, one alone and several at the same time. Only these import TensorFlow.
"""

from __future__ import annotations

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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tfdist.atomic_files import write_atomically
from tfdist.cluster.membership import own_share
from tfdist.launcher.local.local_cluster import LocalRunError, run_local
from tfdist.planning.hardware import Device, Hardware, Link, ring_bytes
from tfdist.strategies.horovod.installation import problem
from tfdist.user_cache import user_cache

_log = logging.getLogger("tfdist")
_SECONDS = 180.0
# Part of the names of the kept files: increase it when the meaning of a measurement changes.
_FORMAT = 3
_SIDE = 1024  # of the matrices
_NUMBERS = 1 << 22  # in a vector that is larger than the caches
_CHAIN, _ROUNDS = 200, 8
_SMALL, _LARGE = 256, 1 << 21  # numbers in a tensor that is summed over processes
_RUNS, _MANY_RUNS, _STEPS = 9, 100, 60
_LONG_ENOUGH = 0.6  # seconds


def this_machine(processes: int | None = None, again: bool = False, cores: Sequence[int] | None = None) -> Hardware:
    """How fast this machine is: as measured before, or measured now, which takes about half a minute.

    Its GPUs are measured if TensorFlow finds some, otherwise its cores: with one process alone, and with several at the
    same time, each with its share of the cores.

    Args:
        processes: how many; by default one for each GPU, or for each core, and at most 8.
        again: whether to measure even if there is an earlier measurement.
        cores: that may be used; by default those of this process.

    Raises:
        ValueError: if `processes` is less than 1.
        tfdist.testing.LocalRunError: if a process of the measurement fails.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"Received: processes={processes}. Expected: at least 1.")
    cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
    processes = min(processes or 8, count_gpus() or len(cores))
    path = _file(len(cores), processes)
    if not again and path.is_file():
        try:
            return Hardware.from_json(path.read_text())
        except ValueError:
            _log.warning("%s cannot be read, and is written anew.", path)
    _log.warning("Measuring this machine with 1 and %d processes; it should have nothing else to do.", processes)
    found = calibrate(cores, processes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, found.to_json())
    except OSError as error:
        _log.warning("What was measured cannot be kept, and will be measured again: %s", error)
    return found


def calibrate(cores: Sequence[int], processes: int) -> Hardware:
    """Measures one process with all of these cores, and several processes with a share of them each.

    Raises:
        tfdist.testing.LocalRunError: if a process fails.
    """
    (alone,) = _run(measure, 1, [list(cores)])
    slowest = alone if processes == 1 else _slowest(_run(measure, processes, shares(cores, processes)))
    return Hardware(
        f"{platform.node()} ({_described(alone, cores, processes)})",
        alone.kind,
        {1: alone.device, **({processes: slowest.device} if alone.kind == "CPU" else {})},
        processes,
        slowest.link,
        slowest.link,
        alone.step,
        slowest.step,
        _horovod(cores, processes, slowest.step),
    )


def shares(cores: Sequence[int], processes: int) -> list[list[int]]:
    """The cores of each process, as `tfdist run` divides them.

    Example:
        >>> shares([0, 1, 2, 3, 4], 2)
        [[0, 1], [2, 3]]
    """
    return [own_share(cores, rank, processes) for rank in range(processes)]


def _run(fn: Callable[..., Any], processes: int, cores: Sequence[Sequence[int]], *more: float) -> list[Any]:
    threads = {"TF_NUM_INTRAOP_THREADS": str(len(cores[0])), "TF_NUM_INTEROP_THREADS": "2"}
    return run_local(fn, workers=processes, args=(cores, *more), timeout=_SECONDS, env=threads)


def _horovod(cores: Sequence[int], processes: int, cluster_step: float) -> Link | None:
    if processes == 1 or problem(importlib.metadata.version("tensorflow")) is not None:
        return None
    try:
        links = _run(measure_horovod, processes, shares(cores, processes), cluster_step)
    except LocalRunError as error:
        _log.warning("Horovod could not be measured, and is left out: %s", error)
        return None
    return _slowest_link(links)


def _slowest(every: Sequence[Measured]) -> Measured:
    """The slowest value of each measurement: a training step waits for the slowest process."""
    devices = [one.device for one in every]
    low = {name: min(getattr(device, name) for device in devices) for name in ("flops", "bandwidth")}
    high = {name: max(getattr(device, name) for device in devices) for name in ("operation", "reserved")}
    device = dataclasses.replace(devices[0], **low, **high)
    link = _slowest_link([one.link for one in every])
    return Measured(every[0].kind, device, max(one.step for one in every), link)


def _slowest_link(links: Sequence[Link]) -> Link:
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


def _memory_of_machine() -> int:
    """Bytes that this process may use; the limit of a container counts."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)


def _described(one: Measured, cores: Sequence[int], processes: int) -> str:
    if one.kind == "GPU":
        return f"{processes} GPUs" if processes > 1 else "1 GPU"
    return f"{len(cores)} cores, of one process or of {processes}" if processes > 1 else f"{len(cores)} cores"


@functools.cache
def count_gpus() -> int:
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def _file(cores: int, processes: int) -> Path:
    tensorflow = importlib.metadata.version("tensorflow")
    parts = (
        platform.node(),
        f"{cores}-cores-{count_gpus()}-gpus-{processes}-processes",
        f"tensorflow-{tensorflow}",
        "horovod" if problem(tensorflow) is None else "no-horovod",
        f"{_FORMAT}.json",
    )
    return Path(user_cache(os.environ), "machines", "-".join(parts))


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one process measures: its device, seconds of a step of Keras, and its link to the other processes."""

    kind: str
    device: Device
    step: float
    link: Link


def measure(cores: Sequence[Sequence[int]]) -> Measured:
    """Measures the device of this process and its link to the others. `cores` are those of each process."""
    import tfdist

    _take_share(cores, tfdist.discover().rank)
    # The strategy has to be made before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    device = "GPU:0" if gpus else "CPU:0"
    memory = _gpu_memory() if gpus else _memory_of_machine() // len(cores)
    with tf.device(device):
        flops = statistics.mean([_matmul(tf), _convolution(tf)])
        # Measured here: all libraries are loaded, and the large vectors do not exist yet.
        reserved = memory // 20 if gpus else psutil.Process().memory_info().rss
        bandwidth, operation = _elementwise(tf), _operation(tf)
    host_link = _to_host(tf, device) if gpus else 0.0
    measured = Device(flops, bandwidth, operation, memory, reserved, host_link)
    small, link = 0.0, Link(1e-4, 1e9)
    if (replicas := strategy.num_replicas_in_sync) > 1:
        small, sent_a_second = _all_reduce(tf, strategy)
        link = Link(latency_of(small, replicas), sent_a_second)
    return Measured("GPU" if gpus else "CPU", measured, max(_keras_step(strategy) - small, 1e-5), link)


def measure_horovod(cores: Sequence[Sequence[int]], cluster_step: float) -> Link:
    """Measures the link to the other processes with Horovod.

    While the cores compute, Horovod's thread has to wait for a core. So its latency is taken from how much longer it
    makes a step of Keras, which is several times the latency on idle cores.

    Args:
        cores: of each process.
        cluster_step: seconds of such a step without Horovod.
    """
    import tfdist

    _take_share(cores, tfdist.discover().rank)
    strategy = tfdist.HorovodStrategy()
    import tensorflow as tf

    small, bandwidth = _all_reduce(tf, strategy)
    small = max(small, _keras_step(strategy) - cluster_step)
    return Link(latency_of(small, strategy.num_replicas_in_sync), bandwidth)


def latency_of(small: float, devices: int) -> float:
    """Seconds of one message, from those of a small all-reduce: a ring sends 2 (N - 1) messages one after the other.

    Example:
        >>> latency_of(0.006, 4)
        0.001
    """
    return small / (2 * max(devices - 1, 1))


def own_gpu(visible: str | None, rank: int) -> str:
    """The value of CUDA_VISIBLE_DEVICES with which a process sees one GPU, its own.

    Args:
        visible: the value so far; None if the variable is not set.
        rank: of the process.

    Example:
        >>> own_gpu(None, 1), own_gpu("4,6", 1), own_gpu("-1", 1)
        ('1', '6', '-1')
    """
    if visible is None:
        return str(rank)
    every = visible.split(",")
    return every[rank] if rank < len(every) else every[-1]


def _take_share(cores: Sequence[Sequence[int]], rank: int) -> None:
    """Keeps this process to its cores and, if there are several, to its GPU. TensorFlow must not be imported yet."""
    os.sched_setaffinity(0, cores[rank])
    if len(cores) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = own_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), rank)


def _matmul(tf: Any) -> float:
    matrix = tf.random.stateless_uniform([_SIDE, _SIDE], [0, 0])
    return 2.0 * _SIDE**3 / _seconds(tf.function(lambda: tf.matmul(matrix, matrix)))


def _convolution(tf: Any) -> float:
    images = tf.random.stateless_uniform([32, 16, 16, 64], [0, 0])
    kernel = tf.random.stateless_uniform([3, 3, 64, 64], [0, 0])
    flops = 2.0 * 32 * 16 * 16 * 64 * 64 * 9
    return flops / _seconds(tf.function(lambda: tf.nn.conv2d(images, kernel, 1, "SAME")))


def _elementwise(tf: Any) -> float:
    """Bytes a second of elementwise operations, forward and backward: as in training, results are kept in between."""
    from tfdist.memory.estimation.trace import VIEWS
    from tfdist.planning.profile import cost_of

    vector = tf.random.stateless_uniform([_NUMBERS], [0, 0])

    @tf.function
    def step(first: Any, factor: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(first)
            value = first
            for _ in range(_ROUNDS):
                value = tf.nn.relu(value * factor + first)
        return tape.gradient(value, first)

    graph = step.get_concrete_function(vector, vector).graph
    operations = [op for op in graph.get_operations() if op.type not in {"Placeholder", *VIEWS}]
    return cost_of(operations).bytes / _seconds(lambda: step(vector, vector))


def _operation(tf: Any) -> float:
    """Seconds that starting an operation takes."""
    few = tf.ones([4])

    @tf.function
    def chain(first: Any, factor: Any) -> Any:
        # The factors are arguments: with constants, TensorFlow would fold or merge the products.
        for _ in range(_CHAIN):
            first = first * factor
        return first

    return _seconds(lambda: chain(few, few)) / _CHAIN


def _to_host(tf: Any, device: str) -> float:
    with tf.device(device):
        vector = tf.zeros([_NUMBERS])
    return 4.0 * _NUMBERS / _seconds(lambda: tf.identity(vector.numpy()))


def _all_reduce(tf: Any, strategy: Any) -> tuple[float, float]:
    """Seconds of an all-reduce of few numbers, and bytes a second of an all-reduce of many."""

    def summed(count: int) -> Callable[[], Any]:
        value = tf.ones([count])

        def on_replica() -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, value)

        return tf.function(lambda: strategy.run(on_replica))

    # All processes have to run the sums equally often: the number of runs must not depend on the time.
    small, whole = _durations(summed(_SMALL), 0.0, _MANY_RUNS), _durations(summed(_LARGE), 0.0)
    # In training several gradients are summed at a time; the shortest run is nearer to that than the usual one.
    seconds = max(min(whole) - min(small), 1e-6)
    return statistics.median(small), ring_bytes(4 * _LARGE, strategy.num_replicas_in_sync) / seconds


def _keras_step(strategy: Any) -> float:
    """Seconds of a step of Keras in which almost nothing is computed."""
    import keras
    import numpy as np

    class Clock(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            times.append(time.perf_counter())

    times: list[float] = []
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
        model.compile("sgd", "mse")
    rows = strategy.num_replicas_in_sync
    data = np.zeros((rows * _STEPS, 1), "float32")
    model.fit(data, data, batch_size=rows, epochs=2, verbose=0, shuffle=False, callbacks=[Clock()])
    last = times[-_STEPS:]
    return statistics.median(b - a for a, b in itertools.pairwise(last))


def _gpu_memory() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return int(said.split()[0]) * 1024 * 1024


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
