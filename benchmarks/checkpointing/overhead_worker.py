"""The process that measures the overhead: one model, one `fit` after another, with and without backups."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.checkpointing.saving import ASYNCHRONOUS, KERAS, SAVINGS, Sample, Saving, in_turns, windows_of
from benchmarks.data_parallel.measure import StepClock


def main(text: str, path: str) -> None:
    """Measures, on the first core and another one, and writes the samples."""
    settings = json.loads(text)
    # Before TensorFlow makes its threads, which inherit it.
    os.sched_setaffinity(0, settings["cores"][:1])
    _let_new_threads_use(settings["cores"])
    Path(path).write_text(json.dumps(measure(settings["rounds"])))


def _let_new_threads_use(cores: Sequence[int]) -> None:
    """Lets threads that Python starts from now on, such as a writer of backups, run on other cores than this one."""

    def first_call(frame: FrameType, event: str, argument: Any) -> None:
        sys.setprofile(None)
        os.sched_setaffinity(0, cores)

    threading.setprofile(first_call)


def measure(rounds: int) -> list[Sample]:
    """All samples, in the order in which they were taken."""
    from benchmarks.checkpointing.training import compiled_model, repeated_batch

    model = compiled_model()
    dataset = repeated_batch()
    _fit(model, dataset, None)  # traces
    return [_fit(model, dataset, saving) for saving in in_turns(SAVINGS, rounds)]


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


if __name__ == "__main__":
    main(*sys.argv[1:])
