"""Keras' trainer and its callbacks: input, building, functions of steps, fit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from tfdist.compat.hooks import KerasHooks, hooks_of
from tfdist.compat.patch import Patch, inherited


def _of(model: Any) -> KerasHooks:
    return hooks_of(model._distribute_strategy)


def _epoch_iterator(original: Callable) -> Callable:
    def __init__(self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any) -> None:
        make = functools.partial(original, self, distribute_strategy, *args)
        hooks_of(distribute_strategy).make_epoch_iterator(self, kwargs, make)

    return __init__


def _maybe_symbolic_build(original: Callable) -> Callable:
    def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        build = functools.partial(original, self, iterator=iterator, data_batch=data_batch)
        _of(self).build(self, iterator, data_batch, build)

    return _maybe_symbolic_build


def _resolve_auto_jit_compile(original: Callable) -> Callable:
    def _resolve_auto_jit_compile(self: Any) -> bool:
        return _of(self).decide_jit_compile(self, functools.partial(original, self))

    return _resolve_auto_jit_compile


def _make_function(original: Callable) -> Callable:
    def _make_function(self: Any, step_function: Callable) -> Callable:
        with _of(self).making_function(self):
            return original(self, step_function)

    return _make_function


def _make_predict_function(original: Callable) -> Callable:
    def make_predict_function(self: Any, force: bool = False) -> Any:
        def make() -> Any:
            with _of(self).making_function(self):
                return original(self, force)

        return _of(self).make_predict_function(self, force, make)

    return make_predict_function


def _get_metrics_result_or_logs(original: Callable) -> Callable:
    def _get_metrics_result_or_logs(self: Any, logs: Any) -> Any:
        _of(self).before_metrics_are_read(self)
        return original(self, logs)

    return _get_metrics_result_or_logs


def _fit(original: Callable) -> Callable:
    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _of(self).fit(self, args, kwargs, original)

    return fit


def _set_model(original: Callable) -> Callable:
    def set_model(self: Any, model: Any) -> None:
        if model:
            hooks_of(getattr(model, "_distribute_strategy", None)).arrange_callbacks(self, model)
        original(self, model)

    return set_model


PATCHES = [
    Patch(
        "keras.src.backend.tensorflow.trainer:TFEpochIterator.__init__",
        _epoch_iterator,
        "keras",
        "no upstream hook tells a strategy that Keras asks for a dataset",
    ),
    Patch(
        inherited(keras.Model, "_maybe_symbolic_build"),
        _maybe_symbolic_build,
        "keras",
        "keras issue 20585",
    ),
    Patch(
        inherited(keras.Model, "make_predict_function"),
        _make_predict_function,
        "keras",
        "no upstream hook tells a strategy which model predicts",
    ),
    Patch(
        inherited(keras.Model, "_make_function"),
        _make_function,
        "keras",
        "Keras compiles the whole step with XLA, which has no collectives",
    ),
    Patch(
        inherited(keras.Model, "_resolve_auto_jit_compile"),
        _resolve_auto_jit_compile,
        "keras",
        "jit_compile='auto' means False under every strategy",
    ),
    Patch(
        inherited(keras.Model, "_get_metrics_result_or_logs"),
        _get_metrics_result_or_logs,
        "keras",
        "no upstream hook tells a strategy that an epoch has ended",
    ),
    Patch(
        "keras.src.callbacks.callback_list:CallbackList.set_model",
        _set_model,
        "keras",
        "tensorflow issue 38635: all workers write one file",
    ),
    Patch(
        inherited(keras.Model, "fit"),
        _fit,
        "keras",
        "no upstream hook: fit cannot be told to go on",
    ),
]
