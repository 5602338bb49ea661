"""A worker of Keras under `tfdist run`: backs up every few steps, and goes on where it was."""

from __future__ import annotations

import sys
from pathlib import Path

import keras

import tfdist
from benchmarks.checkpointing.step_log import StepWriter
from benchmarks.checkpointing.training import compiled_model, repeated_batch


def main(folder: str, save_every: str, most_steps: str) -> None:
    """Trains until the log says stop.

    Args:
        folder: of the log and the backups.
        save_every: steps between backups.
        most_steps: steps after which it stops in any case.
    """
    strategy = tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = compiled_model()
    log = StepWriter(folder, strategy.cluster_resolver.task_id)

    def after_step(batch: int, logs: dict | None = None) -> None:
        model.stop_training = log.write(batch + 1)

    backup = tfdist.callbacks.BackupAndRestore(str(Path(folder, "backup")), save_freq=int(save_every))
    model.fit(
        repeated_batch(),
        steps_per_epoch=int(most_steps),
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=after_step), backup],
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
