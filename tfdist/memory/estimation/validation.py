"""Checks whether a step can be estimated, and reads from the arguments which batch it has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from tfdist.compat.hooks import hooks_of
from tfdist.memory.estimation.batch import assumed, batch_of, specifications_of, symbolic
from tfdist.memory.policy import MemoryPolicy


def check_estimable(model: keras.Model, function: str, batch: Any = None) -> None:
    """Checks that a training step of a model can be traced here.

    Args:
        model: any model. If it is not built, and a batch is given, it is built from that, as `fit` would.
        function: what the user has called.
        batch: specifications of a batch.

    Raises:
        ValueError: if it cannot.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(f"Received: {function}() for {model!r}. Expected: a keras.Model, as the first argument.")
    if not model.compiled:
        raise ValueError(
            f"Received: {function}() for model '{model.name}', which is not compiled. Expected: a model with known "
            "inputs, after `model.compile(optimizer, loss)`."
        )
    if model.optimizer is None:
        raise ValueError(
            f"Received: {function}() for model '{model.name}', which is compiled without an optimizer. Expected: "
            "`model.compile(optimizer, loss)`."
        )
    strategy = model.distribute_strategy
    if not hooks_of(strategy).runs_whole_steps:
        raise ValueError(
            f"Received: {function}() for model '{model.name}' under {type(strategy).__name__}, whose steps run in "
            "other processes or in parts. Expected: the same model without a strategy, or under MirroredStrategy, "
            "MultiWorkerMirroredStrategy or HostOffloadStrategy."
        )
    if not model.built and batch is not None:
        with strategy.scope():
            model._symbolic_build(data_batch=symbolic(batch))
    if not model.built:
        raise ValueError(
            f"Received: {function}() for model '{model.name}', which is not built: its shapes are not known. Expected: "
            "data=(x, y), a batch of arrays, instead of batch_size; or `model.build(input_shape)`, or one call of the "
            "model, before."
        )


def check_chosen(model: keras.Model, policy: MemoryPolicy | None) -> None:
    """Checks that there is something to choose.

    Raises:
        ValueError: if there is not.
    """
    if not isinstance(policy, MemoryPolicy) or not policy.is_automatic:
        raise ValueError(
            f"Received: policy={policy!r}. Expected: tfdist.memory.MemoryPolicy('auto', budget='8GB'), say."
        )
    if model.run_eagerly:
        raise ValueError(
            f"Received: mode 'auto' for model '{model.name}' with run_eagerly=True, whose steps are no graphs that "
            "could be estimated. Expected: run_eagerly=False, or modes of your choice."
        )
    check_not_streamed(model, "nothing is left to choose")


def check_not_streamed(model: keras.Model, why: str) -> None:
    """Checks that a model has no policy of its strategy's.

    Args:
        model: any model.
        why: another policy makes no sense.

    Raises:
        ValueError: if it has one.
    """
    if hooks_of(model.distribute_strategy).streams_weights:
        raise ValueError(
            f"Received: a policy for model '{model.name}' under HostOffloadStrategy, whose blocks are all streamed: "
            f"{why}. Expected: no policy; or the same model under another strategy, or none."
        )


@contextlib.contextmanager
def batch_from(model: keras.Model, function: str, batch_size: int | None, data: Any) -> Iterator[Any]:
    """Gives the specifications of the batch that a user has described, and checks the model.

    Where the batch is derived from `batch_size`, errors in this context say which batch was assumed.

    Args:
        model: any model; one that is not built is built from `data`.
        function: what the user has called.
        batch_size: rows of the global batch; or
        data: a batch `(x, y)` or `(x, y, sample_weight)` of arrays.

    Raises:
        ValueError: if the step cannot be estimated, or the batch is not described in exactly one way.
    """
    _check_one_batch(batch_size, data)
    batch = None if data is None else specifications_of(data)
    check_estimable(model, function, batch)
    if batch is not None:
        yield batch
        return
    batch = batch_of(model, batch_size)
    with assumed(batch):
        yield batch


def _check_one_batch(batch_size: int | None, data: Any) -> None:
    if (data is None) == (batch_size is None):
        given = "neither batch_size nor data" if data is None else "both batch_size and data"
        raise ValueError(f"Received: {given}. Expected: one of them: batch_size=32, say, or data=(x, y).")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"Received: batch_size={batch_size!r}. Expected: a whole number of at least 1.")
    if data is not None and not (isinstance(data, (tuple, list)) and len(data) in (2, 3)):
        raise ValueError(f"Received: data of type {type(data).__name__}. Expected: (x, y) or (x, y, sample_weight).")
