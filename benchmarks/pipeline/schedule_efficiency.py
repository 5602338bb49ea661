"""How near to the ideal speed-up do the schedules come, under plain `fit`? Measured with layers that sleep.

In this way K stages can be as fast as on K devices of their own, on a machine that has not as many cores.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from benchmarks.children import Children
from benchmarks.data_parallel.measure import StepClock
from benchmarks.data_parallel.processes import say
from benchmarks.logical_cpus import logical_cpus

DEVICES = (2, 4, 8)
MICROBATCHES = (4, 16, 32)
SCHEDULES = ("gpipe", "1f1b", "interleaved")
# Of one device and micro-batch, in seconds.
FORWARD, BACKWARD = 0.02, 0.04
# Of an interleaved schedule, on each device. A chunk is one layer: each call of a Python function takes some time, too.
CHUNKS = 2
# Steps that sleep take about the same time.
_MOST_SAMPLES = 2


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each number of devices, of micro-batches, and schedule; schedule "none" is the model as it is."""
    records = []
    for devices in DEVICES[:2] if quick else DEVICES:
        microbatches = MICROBATCHES[:1] if quick else MICROBATCHES
        say(f"schedules: {devices} devices with {', '.join(map(str, microbatches))} micro-batches ...")
        settings = {"devices": devices, "microbatches": microbatches, "samples": min(samples, _MOST_SAMPLES)}
        records += children.python(f"{__package__}.schedule_efficiency", settings, cores=children.cores)
    return records


def ideal_speed_up(devices: int, microbatches: int, chunks: int = 1) -> float:
    """Of a schedule without transfers, for equally long stages.

    Example:
        >>> round(ideal_speed_up(4, 8), 2), round(ideal_speed_up(4, 8, chunks=2), 2)
        (2.91, 3.37)
    """
    return chunks * microbatches * devices / (chunks * microbatches + devices - 1)


def chunks_of(schedule: str) -> int:
    """Into how many chunks the model of one device is cut."""
    return CHUNKS if schedule == "interleaved" else 1


def main(settings: dict) -> list[dict]:
    """Measures one number of devices, in this process; returns the records."""
    devices = settings["devices"]
    _make_devices(devices)
    records = []
    for microbatches in settings["microbatches"]:
        for schedule in (*SCHEDULES, "none"):
            # Sleeping one after the other takes long, and always the same time.
            samples = 1 if schedule == "none" else settings["samples"]
            seconds = _step_seconds(devices, microbatches, schedule, samples)
            of_record = {"devices": devices, "microbatches": microbatches, "schedule": schedule}
            records.append({**of_record, "samples_ms": seconds})
    return records


def _make_devices(count: int) -> None:
    import tensorflow as tf

    # A thread for each stage that sleeps, and some for what is between.
    tf.config.threading.set_inter_op_parallelism_threads(2 * count + 8)
    logical_cpus(count)


def _step_seconds(devices: int, microbatches: int, schedule: str, samples: int) -> list[float]:
    import keras
    import tensorflow as tf

    from benchmarks.pipeline.sleeping import FEATURES, ROWS, Pace

    keras.utils.clear_session()
    pace, clock = Pace(), StepClock(1, samples, 1)
    with _strategy(devices, microbatches, schedule).scope():
        model = _model(devices, schedule, pace)
        model.compile("sgd", "mse", jit_compile=False)
    batch = tf.zeros([microbatches * ROWS, FEATURES])
    dataset = tf.data.Dataset.from_tensors((batch, batch)).repeat()
    model.fit(dataset, steps_per_epoch=2, shuffle=False, verbose=0)

    def after_step(step: int, logs: Any = None) -> None:
        pace.scale = 1.0  # the first step only sees to it that all is there
        clock.tick(step + 1)

    timer = keras.callbacks.LambdaCallback(on_train_batch_end=after_step)
    model.fit(dataset, steps_per_epoch=1 + samples, shuffle=False, verbose=0, callbacks=[timer])
    return clock.milliseconds()


def _strategy(devices: int, microbatches: int, schedule: str) -> Any:
    import tensorflow as tf

    import tfdist

    if schedule == "none":
        return tf.distribute.get_strategy()
    return tfdist.PipelineStrategy(
        [f"CPU:{device}" for device in range(devices)],
        num_microbatches=microbatches,
        schedule=schedule,
        cuts=_names(devices * chunks_of(schedule))[:-1],
    )


def _model(devices: int, schedule: str, pace: Any) -> Any:
    import keras

    from benchmarks.pipeline.sleeping import FEATURES, SleepingLayer

    locks = [threading.Lock() for _ in range(devices)]
    chunks = chunks_of(schedule)
    layers = [
        SleepingLayer(FORWARD / chunks, BACKWARD / chunks, pace, locks[i % devices], name)
        for i, name in enumerate(_names(devices * chunks))
    ]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def _names(layers: int) -> Sequence[str]:
    return [f"sleeping_{i}" for i in range(layers)]
