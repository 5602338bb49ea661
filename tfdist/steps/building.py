"""Building a model before its step is traced: under a strategy, a traced step cannot create variables.

Keras calls the model on a symbolic batch. Some models cannot be called: their `train_step` calls parts of the model, or
takes the batch apart itself (GANs, diffusion models, contrastive learning). For these, the step itself is traced on a
symbolic batch, in a graph that is thrown away; the layers and the optimizer that it uses are then built.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import compute_output_spec
from tfdist.inspection.model_parts import optimizers_of
from tfdist.steps.keras_step import shadowed

_log = logging.getLogger("tfdist")
_STEPS = ("train_step", "test_step")


def build(model: keras.Model, specification: Any) -> None:
    """Builds a model, its metrics, its loss and its optimizers, in the scope of its strategy.

    Args:
        model: a compiled model.
        specification: of a batch: a structure of what has a shape and a dtype.

    Raises:
        Exception: what Keras raises for a model that cannot be called, unless it has a step of its own.
    """
    own = [name for name in _STEPS if getattr(type(model), name) is not getattr(keras.Model, name)]
    try:
        with warnings.catch_warnings(record=True) as warned:
            model._symbolic_build(data_batch=specification)
        _warn_again(warned)
    except Exception as error:
        # Of a model that cannot be called Keras warns, too.
        if not own:
            _warn_again(warned)
            raise
        _log.debug("%s cannot be called (%s); its own steps build it", model.name, error)
        try:
            for name in own:
                _trace(model, getattr(model, name), specification)
        except Exception:
            # Of a model whose variables cannot be made, say: what has failed first tells why.
            raise error from None


def _warn_again(warned: list[warnings.WarningMessage]) -> None:
    for one in warned:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def _trace(model: keras.Model, step: Callable, specification: Any) -> None:
    batch = tf.nest.map_structure(
        lambda x: None if x is None else keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype)),
        specification,
    )
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers_of(model):
            stack.enter_context(shadowed(optimizer, apply=_only_built(optimizer)))
        # A step that fails here fails once more where it is trained, with all that belongs to its error.
        stack.enter_context(contextlib.suppress(Exception))
        compute_output_spec(step, batch)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _only_built(optimizer: keras.optimizers.Optimizer) -> Callable:
    def apply(grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is not None and not optimizer.built:
            with tf.init_scope():
                optimizer.build(list(trainable_variables))

    return apply
