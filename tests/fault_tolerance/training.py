"""The training script of these tests: runs a `Job` in this process and tells all that can be observed after it."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.fault_tolerance import datasets, omissions
from tests.fault_tolerance.job import SECONDS, Job
from tests.fault_tolerance.kills import Kill, while_writing
from tests.fault_tolerance.models import MODELS, rows_of
from tests.fault_tolerance.own_callbacks import Forgetful, Keeper, Thing
from tfdist.compat.keras import hooks_of
from tfdist.inspection.model_state import optimizers_of, parts_of, parts_of_variable, seed_generators_of
from tfdist.strategies.hooks import install


class Observer(keras.callbacks.Callback):
    """Counts, and keeps what EarlyStopping's best weights would hide: plain attributes, as a user's callback has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] | None = []
        self.learning_rates: list[float] = []
        self.batches = 0

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self.batches += 1

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        self.rows = rows_of(self.model)
        self.learning_rates.append(float(np.asarray(self.model.optimizer.learning_rate)))


class Steps(keras.callbacks.Callback):
    """Counts the executions of steps of this process."""

    count = 0

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        Steps.count += 1


def train(job: Job, result: str) -> None:
    """Runs a job; its observations go to a file."""
    print(f"--- {job}", flush=True)
    if job.seed is not None:  # TensorFlow wants one for deterministic operations
        tf.config.experimental.enable_op_determinism()
    install()
    if job.seed is not None:
        keras.utils.set_random_seed(job.seed)
    if job.leave_out:
        omissions.leave_out(job.leave_out)
    if job.hook:
        HOOKS[job.hook]()
    if job.kill and job.kill["when"] == "writing":
        while_writing(job.kill["stage"], job.kill["number"])
    strategy = _strategy(job.strategy, COMPRESSIONS[job.compression])
    with strategy.scope():
        model = MODELS[job.model](job)
    seen: dict[str, Any] = {}
    try:
        for number in range(1, job.fits + 1):
            for name, value in _fit(job, model, number).items():
                seen[f"fit {number}: {name}"] = value
    finally:
        # A preempted process tells, too, how far it came.
        seen["steps of this process"] = Steps.count
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        partial = Path(f"{result}.part")
        partial.write_bytes(pickle.dumps(seen))
        os.replace(partial, result)


COMPRESSIONS: dict[str | None, Any] = {
    None: None,
    "PowerSGD": tfdist.compression.PowerSGD(rank=2),
    "TopK": tfdist.compression.TopK(0.05, momentum_correction=True),
}


def _strategy(name: str | None, compression: Any) -> tf.distribute.Strategy:
    if name is None:
        return tf.distribute.get_strategy()
    if name in ("workers", "unequal workers"):
        shares = [2, 1] if name == "unequal workers" else None
        return tfdist.MultiWorkerMirroredStrategy(peer_timeout=60, compression=compression, batch_shares=shares)
    if name == "local steps":
        return tfdist.LocalStepsStrategy(4, peer_timeout=60)
    if name == "sharded":
        return tfdist.FullyShardedStrategy(peer_timeout=60)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    if name == "host offload":
        return tfdist.HostOffloadStrategy("CPU:1", "CPU:0")
    return tfdist.MirroredStrategy(["CPU:0", "CPU:1"], compression=compression)


def _fit(job: Job, model: keras.Model, number: int) -> dict[str, Any]:
    callbacks = {name: CALLBACKS[name](number) for name in job.callbacks}
    observer = Observer()
    # All runs of a job have the same callbacks; one that does not end the process has a place in the list, too.
    chosen = [Kill("on_train_begin", 0), *callbacks.values(), observer, Steps()]
    if job.kill and job.kill["when"] != "writing" and job.kill.get("fit", 1) == number:
        kill = Kill(**{name: value for name, value in job.kill.items() if name != "fit"})
        chosen[: not kill.comes_last] = [kill]
    if job.backup is not None:
        options = dict(job.backup)
        if options.pop("of_epoch", False):
            options["dataset_fn"] = datasets.own_rows if job.data == "own rows" else datasets.of_epoch
        # tools/compare_backups.py shows what Keras' own callback makes of the same interruptions.
        module = keras if options.pop("of_keras", False) else tfdist
        times = options.pop("times", 1)
        folder = options.pop("folder", "backup")
        if module is tfdist:  # most look at what is left
            options = {"delete_checkpoint": False, **options}
        chosen += [module.callbacks.BackupAndRestore(folder, **options) for _ in range(times)]
    with model.distribute_strategy.scope():
        arguments = {**datasets.arguments(job.data), **datasets.validation(job.validation), "verbose": 0, **job.fit}
    history = model.fit(**arguments, epochs=job.epochs, callbacks=chosen)
    return _observe(model, history, observer, callbacks, job)


def _kept_by_compression(model: keras.Model) -> dict[str, Any]:
    compressor = hooks_of(model.distribute_strategy).compressor
    return {} if compressor is None else compressor.variables_of(model.optimizer)


def _observe(model: keras.Model, history: Any, observer: Observer, callbacks: dict[str, Any], job: Job) -> dict:
    seen: dict[str, Any] = {f"weights/{v.path}/{i}": np.asarray(v) for i, v in enumerate(model.variables)}
    if not model.optimizer.built:  # it was, if it was restored; a train_step with optimizers of its own never uses it
        model.optimizer.build(model.trainable_variables)
    for k, optimizer in enumerate(optimizers_of(model)):
        for part in (optimizer, *parts_of(optimizer)):
            seen |= {f"optimizer/{k}/{part.name}/{i}/{v.name}": np.asarray(v) for i, v in enumerate(part.variables)}
    for name, variable in _kept_by_compression(model).items():
        parts = parts_of_variable(variable)
        seen |= {f"compression/{name}/{i}": part.numpy() for i, part in enumerate(parts)}
    seen |= {f"seed/{i}": np.asarray(g.state) for i, g in enumerate(seed_generators_of(model))}
    seen |= {f"history/{name}": np.asarray(values, "float64") for name, values in history.history.items()}
    seen["epochs"] = list(history.epoch)
    seen |= {f"observer/{name}": value for name, value in vars(observer).items() if not name.startswith("_")}
    seen.pop("observer/params", None)
    seen.pop("observer/model", None)
    for name, callback in callbacks.items():
        for attribute in _ATTRIBUTES.get(name, ()):
            seen[f"{name}/{attribute}"] = getattr(callback, attribute)
    if "csv" in callbacks and os.path.exists(callbacks["csv"].filename):
        seen["csv"] = Path(callbacks["csv"].filename).read_bytes()
    if "checkpoint" in callbacks and os.path.exists(callbacks["checkpoint"].filepath):
        model.load_weights(callbacks["checkpoint"].filepath)
        seen |= {f"best/{i}": value for i, value in enumerate(model.get_weights())}
    if job.seed is not None:
        seen["random"] = [random.random(), float(np.random.rand()), float(tf.random.uniform([]))]
    return seen


CALLBACKS: dict[str, Callable[[int], keras.callbacks.Callback]] = {
    "early": lambda n: keras.callbacks.EarlyStopping("val_auc", mode="max", patience=2, restore_best_weights=True),
    "plateau": lambda n: keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=0.04),
    "checkpoint": lambda n: keras.callbacks.ModelCheckpoint(
        f"best-{n}.weights.h5", "val_auc", mode="max", save_best_only=True, save_weights_only=True
    ),
    "csv": lambda n: keras.callbacks.CSVLogger(f"log-{n}.csv"),
    "gs checkpoint": lambda n: keras.callbacks.ModelCheckpoint("gs://bucket/models/epoch-{epoch:02d}.keras"),
    "schedule": lambda n: keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    "keeper": lambda n: Keeper(),
    "forgetful": lambda n: Forgetful(Thing()),
}
_ATTRIBUTES = {
    "early": ("wait", "best", "best_epoch", "stopped_epoch"),
    "plateau": ("wait", "best", "cooldown_counter"),
    "checkpoint": ("best",),
    "keeper": ("facts",),
}


def _limit_file_size() -> None:
    # Large enough for a log, too small for the tensors of a model.
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, resource.RLIM_INFINITY))


def _disk_of_each_rank() -> None:
    folder = f"disk-{json.loads(os.environ['TF_CONFIG'])['task']['index']}"
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)


def _instead_of_failing(what: Callable[..., Any]) -> Callable[[], None]:
    def hook() -> None:
        global _fit
        original = _fit

        def fit(job: Job, *arguments: Any) -> dict[str, Any]:
            try:
                return original(job, *arguments)
            except RuntimeError as error:
                print(f"fit has raised: {error}", flush=True)
                return what(lambda: original(job.with_(kill=None), *arguments))

        _fit = fit

    return hook


def _be_terminated(fit: Callable[[], Any]) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(20)


HOOKS: dict[str, Callable[[], None]] = {
    "another seed": lambda: keras.utils.set_random_seed(8),
    "small files only": _limit_file_size,
    "a disk of each rank": _disk_of_each_rank,
    "SIGTERM after a fit that failed": _instead_of_failing(_be_terminated),
    "another fit after one that failed": _instead_of_failing(lambda fit: fit()),
}


if __name__ == "__main__":
    # Whatever becomes of the tests, the process does not outlive this.
    signal.alarm(SECONDS)
    train(Job(**json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
