"""The process that trains and measures; it does what the benchmark asks for, one request after the other."""

from __future__ import annotations

import contextlib
import gc
import math
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from benchmarks.parameter_server import models
from benchmarks.parameter_server.trials import WORKERS, Trial
from benchmarks.process_files import cpu_milliseconds

_CALIBRATION_ROUNDS = 2
# At the begin and at the end of an epoch, workers wait for each other.
_LEAST_ROUNDS = 8
_MOST_STEPS = 20_000


class Chief:
    """Trains models with one framework.

    Args:
        keras: `keras` or `tf_keras`.
        strategy: in whose scope models are built; `None` for one process.
        data_of: what fit gets, from a function that makes the dataset.
        configure: applies a trial's options to the strategy.
    """

    def __init__(
        self,
        keras: Any,
        strategy: tf.distribute.Strategy | None,
        data_of: Callable[[Callable], Any],
        configure: Callable[[Trial], object],
    ):
        self._keras, self._strategy, self._data_of, self._configure = keras, strategy, data_of, configure
        self._models: dict[Trial, tuple[Any, int]] = {}
        self._pids: dict[str, list[int]] = {}
        self._ports: list[int] = []

    def meet(self, pids: dict[str, list[int]], ports: list[int]) -> None:
        """Learns about the other processes: their ids by job, and the ports at which they listen."""
        self._pids, self._ports = pids, ports

    def prepare(self, trial: dict, seconds: float) -> int:
        """Builds the model of a trial and trains it a little; returns how many steps take so many seconds."""
        this = Trial.from_dict(trial)
        self._configure(this)
        with self._strategy.scope() if self._strategy else contextlib.nullcontext():
            model = models.build(self._keras, this)
        # As many for each worker.
        least = this.steps_per_execution * max(WORKERS)
        step_ms = self._fit(this, model, _CALIBRATION_ROUNDS * least)["ms"]
        rounds = math.ceil(min(1e3 * seconds / step_ms, _MOST_STEPS) / least)
        steps = least * max(rounds, _LEAST_ROUNDS)
        self._models[this] = model, steps
        return steps

    def measure(self, trial: dict) -> dict[str, float | None]:
        """One sample: milliseconds a step, also those of computing by job, and bytes a step."""
        this = Trial.from_dict(trial)
        self._configure(this)
        model, steps = self._models[this]
        return {**self._fit(this, model, steps), "draw_cpu_ms": self._draw(this, steps)}

    def forget(self) -> None:
        """Lets go of all models."""
        self._models.clear()
        self._keras.backend.clear_session()
        gc.collect()

    def _fit(self, trial: Trial, model: Any, steps: int) -> dict[str, float | None]:
        """Trains for two epochs, and measures the second one: from its begin until all of its steps are done."""
        sample: dict[str, float | None] = {}
        before: dict[str, Any] = {}

        def begin(epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                before["bytes"] = self._bytes()
                before["cpu"] = {job: sum(cpu_milliseconds(pids)) for job, pids in self._pids.items()}
                before["own"], before["time"] = time.process_time(), time.perf_counter()

        def end(epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                sample["ms"] = 1e3 * (time.perf_counter() - before["time"]) / steps
                sample["chief_cpu_ms"] = 1e3 * (time.process_time() - before["own"]) / steps
                for job, pids in self._pids.items():
                    sample[f"{job}_cpu_ms"] = (sum(cpu_milliseconds(pids)) - before["cpu"][job]) / steps
                after = self._bytes()
                known = after is not None and before["bytes"] is not None
                sample["bytes"] = (after - before["bytes"]) / steps if known else None

        watch = self._keras.callbacks.LambdaCallback(on_epoch_begin=begin, on_epoch_end=end)
        # tf_keras would otherwise read the logs back after every step, which Keras 3 never does.
        watch._supports_tf_logs = True
        data = self._data_of(lambda: models.dataset(trial.case))
        model.fit(data, steps_per_epoch=steps, epochs=2, shuffle=False, verbose=0, callbacks=[watch])
        return sample

    def _bytes(self) -> int | None:
        return bytes_between(self._ports) if self._ports else None

    def _draw(self, trial: Trial, steps: int) -> float:
        """Milliseconds of computing to draw a batch in this process, if it is the one that does."""
        if trial.worker_input:
            return 0.0
        batches = iter(models.dataset(trial.case))
        next(batches)
        began = time.process_time()
        for _ in range(steps):
            next(batches)
        return 1e3 * (time.process_time() - began) / steps


def bytes_between(ports: Collection[int]) -> int | None:
    """Bytes of all open connections of the processes that listen at these ports, both directions, so far.

    `None` without the command `ss` (package iproute2).
    """
    if not shutil.which("ss"):
        return None
    output = subprocess.run(["ss", "-tinHO"], capture_output=True, text=True, check=True, timeout=30).stdout
    return count(output, ports)


def count(output: str, ports: Collection[int]) -> int:
    """Adds up what `ss -tinHO` prints: what the side that listened has sent, and what it has received.

    Args:
        output: a line for each connection.
        ports: at which the processes listen; each connection between them has one of these at one of its ends.

    Example:
        >>> count("ESTAB 0 0 127.0.0.1:20001 127.0.0.1:41000 cubic bytes_acked:10 bytes_received:5 segs_out:1", [20001])
        15
    """
    total = 0
    for line in output.splitlines():
        fields = line.split()
        # ESTAB, two queues, this end, the other end, what is counted.
        if len(fields) > 5 and fields[0] == "ESTAB" and int(fields[3].rpartition(":")[2]) in ports:
            total += sum(int(number) for number in re.findall(r"\bbytes_(?:acked|received):(\d+)", line))
    return total
