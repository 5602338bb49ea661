"""What a worker process reports."""

from __future__ import annotations

import json
import os
from pathlib import Path

from benchmarks.data_parallel.measure import StepClock


def write(path: str, clock: StepClock, loss: float, accuracy: float) -> None:
    """Writes the result of a training; called by the process with rank 0.

    Args:
        path: the file.
        clock: has seen the whole training.
        loss: mean loss of the training, a check that all frameworks train the same.
        accuracy: its mean accuracy.
    """
    result = {
        "samples_ms": clock.milliseconds(),
        "loss": loss,
        "accuracy": accuracy,
        "cores": sorted(os.sched_getaffinity(0)),
    }
    Path(path).write_text(json.dumps(result))
