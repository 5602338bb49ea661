"""How long does a pipelined step take to trace, and how large is its graph?"""

from __future__ import annotations

import inspect
import time
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.logical_cpus import logical_cpus

DEVICES = (2, 4)
MICROBATCHES = (4, 8, 16, 32)
LAYERS = 16
WIDTH = 64
BATCH = 64


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each number of devices and micro-batches; 1 and 1 is the model without a pipeline."""
    say(f"tracing: {', '.join(map(str, DEVICES))} devices with {', '.join(map(str, MICROBATCHES))} micro-batches ...")
    settings = {"samples": 1 if quick else samples}
    return children.python(f"{__package__}.trace_cost", settings, cores=children.cores[:1])


def main(settings: dict) -> list[dict]:
    """Measures all combinations in this process; returns the records."""
    logical_cpus(max(DEVICES))
    combinations = [(1, 1), *((devices, count) for devices in DEVICES for count in MICROBATCHES)]
    # What TensorFlow does once in a process is in none.
    _first_step(2, 2)
    records = {key: {"devices": key[0], "microbatches": key[1], "seconds": []} for key in combinations}
    for _ in range(settings["samples"]):
        for key, record in records.items():
            seconds, record["nodes"] = _first_step(*key)
            record["seconds"].append(seconds)
    return list(records.values())


def _first_step(devices: int, microbatches: int) -> tuple[float, int]:
    """Seconds of a `fit` of one step, the first of a model, and the nodes of its graph, functions included."""
    import keras
    import tensorflow as tf

    import tfdist

    keras.utils.clear_session()
    strategy = tf.distribute.get_strategy()
    if devices > 1:
        strategy = tfdist.PipelineStrategy([f"CPU:{i}" for i in range(devices)], num_microbatches=microbatches)
    with strategy.scope():
        model = keras.Sequential([keras.Input((WIDTH,)), *(keras.layers.Dense(WIDTH, "relu") for _ in range(LAYERS))])
        model.compile("sgd", "mse", jit_compile=False)
    batch = tf.zeros([BATCH, WIDTH])
    dataset = tf.data.Dataset.from_tensors((batch, batch)).repeat()
    began = time.perf_counter()
    model.fit(dataset, steps_per_epoch=1, shuffle=False, verbose=0)
    return time.perf_counter() - began, _count_nodes(model.train_function, iter(dataset))


def _count_nodes(function: Any, iterator: Any) -> int:
    # Keras' own function checks for the end of the data around the one that is traced.
    traced = inspect.getclosurevars(function).nonlocals["multi_step_on_iterator"]
    graph = traced.get_concrete_function(iterator).graph.as_graph_def()
    return len(graph.node) + sum(len(each.node_def) for each in graph.library.function)
