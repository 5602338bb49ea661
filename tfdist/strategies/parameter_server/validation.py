"""Refuses, with the reason and the remedy, what cannot be trained with parameter servers."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.inspection.model_parts import metrics_of, optimizers_of, parts_of
from tfdist.steps.validation import check_steps

MODES = ("async", "sync")


def check_arguments(mode: str, max_inflight: int | None, worker_input: bool, backup_workers: int, workers: int) -> None:
    """Checks the arguments of a strategy.

    Raises:
        ValueError: with the reason and the remedy.
    """
    if mode not in MODES:
        raise ValueError(
            f"Received: mode={mode!r}. Expected: 'async', in which each worker's gradient is applied when it comes, or "
            "'sync', in which the workers' gradients of a batch are applied together."
        )
    if max_inflight is not None and max_inflight < 1:
        raise ValueError(
            f"Received: max_inflight={max_inflight}. Expected: at least 1 (one execution at a time), or None."
        )
    if not 0 <= backup_workers < workers:
        raise ValueError(
            f"Received: backup_workers={backup_workers} of {workers} workers. Expected: 0 or more, and at least one "
            "worker beside them."
        )
    if mode == "sync" and worker_input:
        raise ValueError(
            "Received: mode='sync' and worker_input=True. In synchronous training the coordinator cuts each batch into "
            "the workers' shards. Expected: worker_input=False, or mode='async'."
        )
    if mode == "async" and backup_workers:
        raise ValueError(
            f"Received: mode='async' and backup_workers={backup_workers}. Nobody waits for the slowest worker in "
            "asynchronous training. Expected: backup_workers=0, or mode='sync'."
        )


def check(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Checks a compiled model, before it is built or after.

    Raises:
        ValueError: if it cannot be trained under this strategy.
    """
    if model.run_eagerly:
        raise ValueError(
            "Received: run_eagerly=True under ParameterServerStrategy. Workers run functions that were traced; Python "
            "code stays in the coordinator's process. Expected: run_eagerly=False. To step through the model, train "
            "it without a strategy."
        )
    if model.jit_compile is True:
        raise ValueError(
            "Received: compile(jit_compile=True) under ParameterServerStrategy. XLA compiles for one device, and the "
            "variables are on others. Expected: jit_compile=False or 'auto' (the default)."
        )
    check_steps(model)
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"Received: layer '{layer.name}' with stateful=True, which keeps a state from batch to batch. Batches "
                "that follow one another are computed on different workers. Expected: stateful=False."
            )
    for optimizer in optimizers_of(model):
        for part in [optimizer, *parts_of(optimizer)]:
            if part._distribution_strategy is not strategy:
                raise ValueError(
                    f"Received: optimizer '{part.name}', created outside of this strategy's scope. Its variables would "
                    "be in the coordinator's process, where workers do not see them. Expected: an optimizer created "
                    "in the scope, `with strategy.scope(): optimizer = ...`, or its name, `compile('adam', ...)`."
                )
            steps = getattr(part, "gradient_accumulation_steps", None)
            if steps and strategy._mode == "async" and strategy._max_inflight > 1:
                raise ValueError(
                    f"Received: gradient_accumulation_steps={steps} in asynchronous training. Several workers would "
                    "add to the sums at a time, and one would update the weights while another one adds. Expected: "
                    "mode='sync', max_inflight=1, or a larger batch."
                )
    for variable in model.variables:
        _check_variable(variable, "model variable", ("ps",))
    for metric in metrics_of(model):
        for variable in metric.variables:
            _check_variable(variable, f"variable of metric '{metric.name}',", ("chief", "ps"))


def _check_variable(variable: Any, what: str, jobs: tuple[str, ...]) -> None:
    if variable._value is not None and tf.DeviceSpec.from_string(variable._value.device).job not in jobs:
        raise ValueError(
            f"Received: {what} '{variable.path}', created outside of strategy.scope(); it is on no parameter server. "
            "Expected: model, metrics and loss objects are created in this strategy's scope: "
            "`with strategy.scope(): ...`, around load_model, too."
        )
