"""What a training job of these tests is: plain data, so that it can be sent to another process."""

from __future__ import annotations

import dataclasses
from typing import Any

ROWS = 58
# After so many, a job ends by SIGALRM.
SECONDS = 240
CALLBACKS = ("early", "plateau", "checkpoint", "csv")


@dataclasses.dataclass(frozen=True)
class Job:
    """One run of a training script.

    Attributes:
        data: name of the data, see `datasets.py`.
        model: name of the model, see `models.py`.
        epochs: passed to `fit`.
        steps_per_execution: passed to `compile`.
        fit: further arguments of `fit`.
        validation: name of the validation data, or nothing.
        callbacks: names of the callbacks beside the backup, see `training.py`.
        seed: of `keras.utils.set_random_seed`; `None` sets none.
        fits: how often to call `fit`.
        strategy: `None`, "mirrored", "host offload", "workers", "unequal workers", "sharded" or "local steps".
        compression: of the strategy: `None`, or a name of `training.py`.
        backup: arguments of `BackupAndRestore`; `None` leaves it out.
        kill: how the process ends itself, see `kills.py`.
        leave_out: what is not restored, see `omissions.py`.
        hook: name of a further change to the run, see `training.py`.
    """

    data: str = "arrays"
    model: str = "dense"
    epochs: int = 7
    steps_per_execution: int = 3
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    validation: str = "arrays"
    callbacks: tuple[str, ...] = CALLBACKS
    seed: int | None = 1
    fits: int = 1
    strategy: str | None = None
    compression: str | None = None
    backup: dict[str, Any] | None = None
    kill: dict[str, Any] | None = None
    leave_out: str | None = None
    hook: str | None = None

    def with_(self, **changes: Any) -> Job:
        """This job with some changes."""
        return dataclasses.replace(self, **changes)

    @property
    def light(self) -> Job:
        """The same with a model and callbacks that take little time, for tests that are about something else."""
        return self.with_(model="light", callbacks=("csv",), validation="", epochs=4)

    @property
    def reference(self) -> Job:
        """The uninterrupted run without a backup."""
        return self.with_(backup=None, kill=None, leave_out=None, hook=None)
