"""How the overhead of backups is measured: the kinds of saving, which steps count, and what they say."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from benchmarks.children import Children
from benchmarks.data_parallel.measure import StepClock
from benchmarks.data_parallel.processes import say

ASYNCHRONOUS = "asynchronous"
SYNCHRONOUS = "synchronous"
KERAS = "keras"
MODES = {
    ASYNCHRONOUS: "tfdist, asynchronous",
    SYNCHRONOUS: "tfdist, synchronous",
    KERAS: "keras.callbacks.BackupAndRestore",
}
INTERVALS = (1, 8, 64)
# Longer than it takes to write a backup in the background, which may slow down the steps after the one that it is of.
_SHORTEST_WINDOW = 8
_STEPS = 64
_STEPS_IF_SLOW = 16


class Saving(NamedTuple):
    """A backup of some kind every so many steps."""

    mode: str
    every: int


SAVINGS = tuple(Saving(mode, every) for mode in MODES for every in INTERVALS)


class Windows(NamedTuple):
    """Which steps of a `fit` are measured."""

    warmup: int
    windows: int
    steps: int

    @property
    def total_steps(self) -> int:
        """Steps of the whole `fit`; one more than are measured, so that the end of it is not in a window."""
        return self.warmup + self.windows * self.steps + 1


WITHOUT = Windows(warmup=8, windows=5, steps=_SHORTEST_WINDOW)


def windows_of(saving: Saving | None) -> Windows:
    """Windows of whole intervals between saves, with the saves in the middle of them.

    Example:
        >>> windows_of(Saving(ASYNCHRONOUS, 8)), windows_of(Saving(ASYNCHRONOUS, 64))
        (Windows(warmup=12, windows=8, steps=8), Windows(warmup=16, windows=2, steps=64))
    """
    if saving is None:
        return WITHOUT
    steps = max(saving.every, _SHORTEST_WINDOW)
    is_slow = saving.every == 1 and saving.mode != ASYNCHRONOUS
    measured = max(_STEPS_IF_SLOW if is_slow else _STEPS, 2 * saving.every)
    return Windows(min(8 + saving.every // 2, 16), measured // steps, steps)


def in_turns(savings: Sequence[Saving], rounds: int) -> Iterator[Saving | None]:
    """All savings once a round, and training without backups (None) before and after each of them.

    Example:
        >>> [saving and saving.every for saving in in_turns([Saving(KERAS, 1), Saving(KERAS, 8)], 2)]
        [None, 1, None, 8, None, 1, None, 8, None]
    """
    for _ in range(rounds):
        for saving in savings:
            yield None
            yield saving
    yield None


class Sample(NamedTuple):
    """One `fit`.

    Attributes:
        saving: its backups; None without any.
        milliseconds: of a step, window by window.
        written: the share of the backups that were due and were written; None if that was not counted.
    """

    saving: Saving | None
    milliseconds: list[float]
    written: float | None = None


def ratios(samples: Sequence[Sample]) -> dict[Saving, list[float]]:
    """The time of a step with backups in units of that without, window by window.

    Each is compared with the trainings without backups just before and after it.

    Args:
        samples: in the order in which they were taken, of `in_turns`.

    Example:
        >>> without, backup = Sample(None, [10.0, 20.0]), Sample(Saving(KERAS, 8), [30.0, 45.0])
        >>> ratios([without, backup, without])
        {Saving(mode='keras', every=8): [2.0, 3.0]}
    """
    found: dict[Saving, list[float]] = {}
    for before, sample, after in zip(samples, samples[1:], samples[2:], strict=False):
        if sample.saving is not None:
            without = statistics.median([*before.milliseconds, *after.milliseconds])
            found.setdefault(sample.saving, []).extend(each / without for each in sample.milliseconds)
    return found


def measure(children: Children, samples: int, quick: bool) -> list:
    """Samples, in the order in which they were taken, with each kind of backup once a round."""
    rounds = 1 if quick else samples
    say(f"overhead of backups, {rounds} rounds ...")
    return children.python(f"{__package__}.saving", {"cores": children.cores, "rounds": rounds}, children.cores)


def main(settings: dict) -> list[Sample]:
    """Measures, on the first core and another one, and returns the samples."""
    # Before TensorFlow makes its threads, which inherit it.
    os.sched_setaffinity(0, settings["cores"][:1])
    _let_new_threads_use(settings["cores"])
    from benchmarks.checkpointing.training import compiled_model, repeated_batch

    model = compiled_model()
    dataset = repeated_batch()
    _fit(model, dataset, None)  # traces
    return [_fit(model, dataset, saving) for saving in in_turns(SAVINGS, settings["rounds"])]


def _let_new_threads_use(cores: Sequence[int]) -> None:
    """Lets threads that Python starts from now on, such as a writer of backups, run on other cores than this one."""

    def first_call(frame: FrameType, event: str, argument: Any) -> None:
        sys.setprofile(None)
        os.sched_setaffinity(0, cores)

    threading.setprofile(first_call)


def _fit(model: Any, dataset: Any, saving: Saving | None) -> Sample:
    import keras

    windows = windows_of(saving)
    clock = StepClock(*windows)
    timer = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: clock.tick(batch + 1))
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
        # Here tfdist says what it has saved.
        os.environ["TFDIST_LOG_DIR"] = folder
        callbacks = [timer, *([_backup(saving, f"{folder}/backup")] if saving else [])]
        model.fit(dataset, steps_per_epoch=windows.total_steps, shuffle=False, verbose=0, callbacks=callbacks)
        return Sample(saving, clock.milliseconds(), _written(saving, Path(folder, "events.jsonl")))


def _backup(saving: Saving, folder: str) -> Any:
    import keras

    import tfdist

    if saving.mode == KERAS:
        return keras.callbacks.BackupAndRestore(folder, save_freq=saving.every)
    asynchronous = saving.mode == ASYNCHRONOUS
    return tfdist.callbacks.BackupAndRestore(folder, save_freq=saving.every, asynchronous=asynchronous)


def _written(saving: Saving | None, log: Path) -> float | None:
    if saving is None or saving.mode == KERAS:
        return None
    # The last step ends the epoch, and is saved for that.
    last = windows_of(saving).total_steps - 1
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return sum(event["event"] == "saved" and event["step"] <= last for event in events) / (last // saving.every)
