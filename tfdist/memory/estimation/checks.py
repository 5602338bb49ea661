"""Which models' steps can be estimated."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.memory.estimation.batch import symbolic
from tfdist.memory.policy import MemoryPolicy
from tfdist.strategies.host_offload import HostOffloadStrategy
from tfdist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfdist.strategies.pipeline.strategy import PipelineStrategy


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
    if isinstance(strategy, (ParameterServerStrategy, PipelineStrategy)):
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

    Args:
        model: any model.
        policy: what the user has given.

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
    if isinstance(model.distribute_strategy, HostOffloadStrategy):
        raise ValueError(
            f"Received: a policy for model '{model.name}' under HostOffloadStrategy, whose blocks are all streamed: "
            f"{why}. Expected: no policy; or the same model under another strategy, or none."
        )


def check_one_batch(batch_size: int | None, data: Any) -> None:
    """Checks that the batch is described in one way.

    Args:
        batch_size: its rows, or `None`.
        data: a batch, or `None`.

    Raises:
        ValueError: if both are given, or none.
    """
    if (data is None) == (batch_size is None):
        given = "neither batch_size nor data" if data is None else "both batch_size and data"
        raise ValueError(f"Received: {given}. Expected: one of them: batch_size=32, say, or data=(x, y).")
    if batch_size is not None and (isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1):
        raise ValueError(f"Received: batch_size={batch_size!r}. Expected: a whole number of at least 1.")
    if data is not None and not (isinstance(data, (tuple, list)) and len(data) in (2, 3)):
        raise ValueError(f"Received: data of type {type(data).__name__}. Expected: (x, y) or (x, y, sample_weight).")
