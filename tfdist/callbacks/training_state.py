"""What a model in training consists of, as tensors: taken quickly, written later, put back exactly.

Weights, seeds, optimizer and metrics. Variables that every replica keeps by itself (metrics in the middle of an epoch)
are saved replica by replica: their sum, put back in parts, would round differently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator

from tfdist.strategies.replica_values import combine, gather, is_kept_per_replica, parts_of_variable, scatter
from tfdist.strategies.step_shadows import optimizers_of, parts_of, seed_generators_of

_PER_REPLICA = "replicas"


class StateMismatch(ValueError):
    """A backup is of another model or optimizer; the text names the first differences."""


def variables_of(model: keras.Model) -> dict[str, list[Any]]:
    """The Keras variables of a built model by group, each once, in a stable order."""
    groups = {
        "model": list(model.variables),
        "seeds": [generator.state for generator in seed_generators_of(model)],
        "metrics": list(model.metrics_variables),
        "optimizer": [v for o in optimizers_of(model) for part in [o, *parts_of(o)] for v in part.variables],
    }
    seen: set[int] = set()
    unique: dict[str, list[Any]] = {}
    for group, variables in groups.items():
        unique[group] = []
        for variable in variables:
            if id(variable) not in seen:
                seen.add(id(variable))
                unique[group].append(variable)
    return unique


def describe(model: keras.Model) -> dict[str, list]:
    """Path, shape and dtype of every variable, by group: what a backup must fit."""
    return {
        group: [[v.path, list(v.shape), keras.backend.standardize_dtype(v.dtype)] for v in variables]
        for group, variables in variables_of(model).items()
    }


def check(model: keras.Model, saved: Mapping[str, list]) -> None:
    """Raises StateMismatch if the model has other variables than those that were saved."""
    for group, now in describe(model).items():
        then = saved.get(group, [])
        # Paths count a process' layers (dense, dense_1, ...) and may differ where nothing else does.
        for (path, shape, dtype), (saved_path, saved_shape, saved_dtype) in zip(now, then, strict=False):
            if (shape, dtype) != (list(saved_shape), saved_dtype):
                raise _mismatch(f"{group} variable {path} {shape} {dtype}", f"{saved_path} {saved_shape} {saved_dtype}")
        if len(now) != len(then):
            longer = now if len(now) > len(then) else then
            first = longer[min(len(now), len(then))]
            raise _mismatch(
                f"{len(now)} {group} variables",
                f"{len(then)}; the first one that only {'this fit' if longer is now else 'the backup'} has is {first}",
            )


def make_global_seed_generator(model: keras.Model, saved: Mapping[str, list]) -> None:
    """Makes the seed generator of `keras.random` now, if it was there when `saved` was made: Keras makes it late."""
    if len(saved["seeds"]) > len(variables_of(model)["seeds"]):
        with model.distribute_strategy.scope():
            global_seed_generator()


def _mismatch(received: str, expected: str) -> StateMismatch:
    return StateMismatch(
        f"The backup is of another model or optimizer. Received: {received}. Expected, as saved: {expected}. Build and "
        "compile the model as before, or pass another backup_dir to begin anew."
    )


def snapshot(model: keras.Model, with_metrics: bool) -> dict[str, tf.Tensor]:
    """Current values of all variables, as tensors that later training steps do not change.

    With several workers and `with_metrics` this is a collective: all workers call it at the same step.

    Args:
        model: a built model.
        with_metrics: whether metrics are in the middle of an epoch, so that their values are needed.
    """
    tensors: dict[str, tf.Tensor] = {}
    per_replica: dict[str, Any] = {}
    for name, variable in _named(model):
        if name.startswith("metrics/") and not with_metrics:
            continue
        if is_kept_per_replica(variable):
            per_replica[f"{_PER_REPLICA}/{name}"] = variable
        else:
            # Shares the buffer: TensorFlow copies it when the next step writes to the variable.
            tensors[name] = tf.identity(parts_of_variable(variable)[0])
    if per_replica:
        values = gather(model.distribute_strategy, list(per_replica.values()))
        tensors.update(zip(per_replica, values, strict=True))
    return tensors


def load(model: keras.Model, tensors: Mapping[str, np.ndarray]) -> None:
    """Puts a snapshot back, also one of another number of replicas, or of none."""
    for name, variable in _named(model):
        whole, replicas = tensors.get(name), tensors.get(f"{_PER_REPLICA}/{name}")
        if whole is None and replicas is None:
            continue
        if is_kept_per_replica(variable):
            scatter(model.distribute_strategy, variable, whole[np.newaxis] if replicas is None else replicas)
            continue
        for part in parts_of_variable(variable):
            part.assign(tf.constant(combine(variable, replicas) if whole is None else whole, dtype=part.dtype))


def _named(model: keras.Model) -> Iterator[tuple[str, Any]]:
    for group, variables in variables_of(model).items():
        for i, variable in enumerate(variables):
            yield f"{group}/{i}", variable
