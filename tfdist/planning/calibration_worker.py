"""What one process measures of its device, while the others measure theirs."""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from tfdist.planning.communication import ring_bytes
from tfdist.planning.hardware import Link

_SIDE = 1024  # of the matrices
_NUMBERS = 1 << 22  # of a vector that no cache holds
_CHAIN, _ROUNDS = 200, 8
_SMALL, _LARGE = 256, 1 << 21  # numbers in a tensor that is summed up
_RUNS, _MANY_RUNS, _STEPS = 9, 100, 60
_LONG_ENOUGH = 0.6  # seconds


@dataclasses.dataclass(frozen=True)
class Measured:
    """See `tfdist.planning.hardware`; `memory` is 0 for cores."""

    kind: str
    flops: float
    bandwidth: float
    operation: float
    host_link: float
    memory: int
    reserved: int
    step: float
    latency: float
    bandwidth_of_link: float


def measure(cores: Sequence[Sequence[int]]) -> Measured:
    """Measures the device of this process, and the way to the others.

    Args:
        cores: of each process.
    """
    import tfdist

    _take_share(cores, tfdist.discover().rank)
    # Before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()
    import psutil
    import tensorflow as tf

    gpus = tf.config.list_physical_devices("GPU")
    device = "GPU:0" if gpus else "CPU:0"
    memory = _gpu_memory() if gpus else 0
    with tf.device(device):
        flops = statistics.mean([_matmul(tf), _convolution(tf)])
        # All libraries are loaded, and the large vectors are still to come.
        reserved = memory // 20 if gpus else psutil.Process().memory_info().rss
        bandwidth, operation = _elementwise(tf), _operation(tf)
    host_link = _to_host(tf, device) if gpus else 0.0
    small, link = _all_reduce(tf, strategy) if strategy.num_replicas_in_sync > 1 else (0.0, 1e9)
    step = max(_keras_step(strategy) - small, 1e-5)
    return Measured(
        "GPU" if gpus else "CPU",
        flops,
        bandwidth,
        operation,
        host_link,
        memory,
        reserved,
        step,
        latency_of(small, strategy.num_replicas_in_sync),
        link,
    )


def measure_horovod(cores: Sequence[Sequence[int]], cluster_step: float) -> Link:
    """Measures the way to the others by Horovod.

    Its thread waits for its turn where the cores compute. So the latency is what a step of Keras takes longer by it,
    several times what it is on idle cores.

    Args:
        cores: of each process.
        cluster_step: what such a step takes besides.
    """
    import tfdist

    _take_share(cores, tfdist.discover().rank)
    strategy = tfdist.HorovodStrategy()
    import tensorflow as tf

    small, bandwidth = _all_reduce(tf, strategy)
    small = max(small, _keras_step(strategy) - cluster_step)
    return Link(latency_of(small, strategy.num_replicas_in_sync), bandwidth)


def latency_of(small: float, devices: int) -> float:
    """Seconds of a message, of which a ring sends 2 (N - 1) one after the other, from those of a sum of few numbers.

    Example:
        >>> latency_of(0.006, 4)
        0.001
    """
    return small / (2 * max(devices - 1, 1))


def own_gpu(visible: str | None, rank: int) -> str:
    """What CUDA_VISIBLE_DEVICES has to be for a process with one of the GPUs that another process sees.

    Example:
        >>> own_gpu(None, 1), own_gpu("4,6", 1), own_gpu("-1", 1)
        ('1', '6', '-1')
    """
    if visible is None:
        return str(rank)
    every = visible.split(",")
    return every[rank] if rank < len(every) else every[-1]


def _take_share(cores: Sequence[Sequence[int]], rank: int) -> None:
    """The cores of this process, and of several its GPU: TensorFlow has not looked for any yet."""
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
    """As in training: what the way there makes is kept for the way back, where it is overwritten."""
    from tfdist.memory.estimation.traced_graph import VIEWS
    from tfdist.planning.profiling import cost_of

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
    few = tf.ones([4])

    @tf.function
    def chain(first: Any, factor: Any) -> Any:
        # Of arguments, nothing is computed beforehand or merged.
        for _ in range(_CHAIN):
            first = first * factor
        return first

    return _seconds(lambda: chain(few, few)) / _CHAIN


def _to_host(tf: Any, device: str) -> float:
    with tf.device(device):
        vector = tf.zeros([_NUMBERS])
    return 4.0 * _NUMBERS / _seconds(lambda: tf.identity(vector.numpy()))


def _all_reduce(tf: Any, strategy: Any) -> tuple[float, float]:
    """Seconds of the sum of a few numbers, and bytes a second of that of many."""

    def summed(count: int) -> Callable[[], Any]:
        value = tf.ones([count])

        def on_replica() -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, value)

        return tf.function(lambda: strategy.run(on_replica))

    # All processes have to run them equally often.
    small, whole = _durations(summed(_SMALL), 0.0, _MANY_RUNS), _durations(summed(_LARGE), 0.0)
    # In training, sums of several gradients are on their way at a time: the shortest run is nearer to that.
    seconds = max(min(whole) - min(small), 1e-6)
    return statistics.median(small), ring_bytes(4 * _LARGE, strategy.num_replicas_in_sync) / seconds


def _keras_step(strategy: Any) -> float:
    """Seconds of a step in which next to nothing is computed."""
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
    import subprocess

    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    return int(said.split()[0]) * 1024 * 1024


def _seconds(run: Callable[[], Any]) -> float:
    """What a run usually takes."""
    return statistics.median(_durations(run, _LONG_ENOUGH))


def _durations(run: Callable[[], Any], least: float, runs: int = _RUNS) -> list[float]:
    """Of so many runs, after two that are not counted, and of more until they have taken `least` seconds together."""
    import tensorflow as tf

    durations: list[float] = []
    # Cores need a while until they are as fast as they get.
    while len(durations) < 2 + runs or sum(durations[2:]) < least:
        begin = time.perf_counter()
        # What is read has been computed, on whatever device.
        for result in tf.nest.flatten(run()):
            tf.reshape(result, [-1])[0].numpy()
        durations.append(time.perf_counter() - begin)
    return durations[2:]
