"""Runs a training script up to its first fit, to see what it would train."""

from __future__ import annotations

import contextlib
import inspect
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

import tfdist
from tfdist.compat.upstream import TFEpochIterator
from tfdist.launcher.arguments import Target
from tfdist.memory.estimate import specifications_of

_STRATEGIES = (
    *("FullyShardedStrategy", "HorovodStrategy", "HostOffloadStrategy", "LocalStepsStrategy"),
    *("MirroredStrategy", "MultiWorkerMirroredStrategy", "ParameterServerStrategy", "PipelineStrategy"),
)


class _FitReached(BaseException):
    """Ends the script at its first fit, with the model and the batch. Not an `Exception`: a script may catch these."""


class NoFitError(ValueError):
    """A program without a call of fit that can be planned; the message says what is expected."""


class NoStrategy:
    """Replaces every strategy while the script runs, and does nothing: the plan compares strategies afterwards."""

    num_replicas_in_sync = 1
    is_chief = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """No scope."""
        yield

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"Received: strategy.{name}. Expected: only strategy.scope() before model.fit(): `tfdist plan` runs the "
            "script without a strategy up to there. Call tfdist.plan(model, batch_size) in a script of its own."
        )


def model_and_batch(target: Target) -> tuple[keras.Model, Any]:
    """The model that a script fits first, and specifications of its first batch.

    The script runs up to its first fit, with strategies that do nothing. Nothing is trained.

    Args:
        target: the script and its arguments.

    Raises:
        NoFitError: if the script ends without a call of fit, or fits without data.
        Exception: what the script raises before its first fit.
    """
    program, *arguments = target.words
    folder = os.getcwd() if target.kind == "module" else os.path.dirname(os.path.abspath(program))
    signature = inspect.signature(keras.Model.fit)

    def fit(*args: Any, **kwargs: Any) -> None:
        called = signature.bind(*args, **kwargs)
        called.apply_defaults()
        raise _FitReached(args[0], _first_batch(**called.arguments))

    try:
        with (
            mock.patch.object(sys, "argv", [program, *arguments]),
            mock.patch.object(sys, "path", [folder, *sys.path]),
            mock.patch.dict(vars(tfdist), dict.fromkeys(_STRATEGIES, NoStrategy)),
            mock.patch.object(keras.Model, "fit", fit),
        ):
            if target.kind == "module":
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(program, run_name="__main__")
    except _FitReached as found:
        return found.args
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
    raise NoFitError(
        f"Received: {program}, which has ended without a call of model.fit(). Expected: a script that calls it with "
        "these arguments. For a loop of your own, call tfdist.plan(model, batch_size) instead."
    )


def _first_batch(
    x: Any, y: Any, sample_weight: Any, batch_size: int | None, steps_per_epoch: int | None, **others: Any
) -> Any:
    """Specifications of the first batch that Keras would train on."""
    iterator = TFEpochIterator(
        x=x,
        y=y,
        sample_weight=sample_weight,
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        shuffle=False,
        distribute_strategy=tf.distribute.get_strategy(),
        steps_per_execution=1,
    )
    batch = next(iter(iterator._distributed_dataset), None)
    if batch is None:
        raise NoFitError(
            "Received: a call of model.fit() without data: the dataset is empty. Expected: at least one batch."
        )
    x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
    return specifications_of((x, y) if weights is None else (x, y, weights))
