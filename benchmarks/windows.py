"""Windows of steps: how long they take, and how much computing time of each process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.process_files import cpu_milliseconds

# Long enough for computing times, which are told in units of 10 ms.
SECONDS = 1.2
_LEAST, _MOST = 2, 100


def steps_of_window(step_seconds: float, seconds: float = SECONDS) -> int:
    """How many steps a window has.

    Example:
        >>> steps_of_window(0.1), steps_of_window(5.0)
        (12, 2)
    """
    return min(max(round(seconds / step_seconds), _LEAST), _MOST)


class Windows:
    """Samples of one variant.

    Args:
        pids: the processes.

    Attributes:
        record: what was measured: milliseconds a step of each window ("samples_ms"), and those of computing for each
            process ("cpu_ms"); the cores that each process may use ("cores").
    """

    def __init__(self, pids: Sequence[int]):
        cores = [sorted(os.sched_getaffinity(pid)) for pid in pids]
        self.record: dict = {"samples_ms": [], "cpu_ms": [], "cores": cores}
        self._pids = pids

    def begin(self) -> None:
        """A window begins."""
        self._cpu, self._time = cpu_milliseconds(self._pids), time.perf_counter()

    def end(self, steps: int) -> None:
        """It ends, after that many steps."""
        self.record["samples_ms"].append(1e3 * (time.perf_counter() - self._time) / steps)
        used = zip(self._cpu, cpu_milliseconds(self._pids), strict=True)
        self.record["cpu_ms"].append([(after - before) / steps for before, after in used])


class FitWindows:
    """Samples of one model, each a window in the middle of a `fit`. To make it traces the model's step.

    Args:
        model: a compiled Keras model.
        data: a dataset without an end.
        pids: the processes.
        seconds: that a window takes, roughly.
        steps: of a window; by default as many as take these seconds. Processes that train together need the same.
        settle: waits until what was begun is done, for devices that compute while the program goes on.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        pids: Sequence[int],
        seconds: float = SECONDS,
        steps: int | None = None,
        settle: Callable[[], object] = lambda: None,
    ):
        self._settle = settle
        self._model, self._data, self._windows = model, data, Windows(pids)
        self._fit(1)
        began = time.perf_counter()
        self._fit(2)
        self._steps = steps or steps_of_window((time.perf_counter() - began) / 2, seconds)

    def run(self) -> None:
        """Measures one window."""
        import keras

        def after_step(step: int, logs: Any = None) -> None:
            if step == 0:
                self._settle()
                self._windows.begin()
            elif step == self._steps:
                self._settle()
                self._windows.end(self._steps)

        self._fit(1 + self._steps, keras.callbacks.LambdaCallback(on_train_batch_end=after_step))

    @property
    def record(self) -> dict:
        """The steps of a window, and the samples: see `Windows`."""
        return {"steps": self._steps, **self._windows.record}

    def _fit(self, steps: int, *callbacks: Any) -> None:
        self._model.fit(self._data, steps_per_epoch=steps, shuffle=False, verbose=0, callbacks=list(callbacks))


def take_turns(models: Iterable[FitWindows], samples: int) -> None:
    """Measures so many windows of each model."""
    for _ in range(samples):
        for one in models:
            one.run()
