"""The state of a model in training as tensors, which are taken quickly, written later and put back exactly.

Weights, seeds, optimizer and metrics. Variables that every replica keeps by itself (metrics in the middle of an epoch)
are saved replica by replica: their sum, put back in parts, would round differently.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.upstream import global_seed_generator
from tfdist.inspection.global_seeds import is_used
from tfdist.inspection.model_parts import metrics_of, optimizers_of, parts_of, seed_generators_of
from tfdist.inspection.replica_values import combine, gather, is_kept_per_replica, parts_of_variable, scatter

_PER_REPLICA = "replicas"
# All other seed generators belong to a layer, and their states to the model's variables.
_GLOBAL_SEED = "seeds/0"


class StateMismatchError(ValueError):
    """A backup is of another model or optimizer; the text names the first differences."""


class TrainingState:
    """The state of a model in training.

    Args:
        model: a model that is built, and compiled, before anything but `make_global_seed_generator` is called.
    """

    def __init__(self, model: keras.Model):
        self._model = model

    @functools.cached_property
    def _variables(self) -> dict[str, Any]:
        """The model's Keras variables by name, each once, in a stable order."""
        model = self._model
        if model.optimizer is not None and not model.optimizer.built:
            # A train_step with optimizers of its own (a GAN's) may never use it, but a model that resumes has it built.
            model.optimizer.build(model.trainable_variables)
        groups = {
            "model": list(model.variables),
            "seeds": [generator.state for generator in seed_generators_of(model) if is_used(generator)],
            "metrics": list(model.metrics_variables),
            # Metrics that Keras does not know, and does not reset at the beginning of an epoch.
            "other metrics": [variable for metric in metrics_of(model) for variable in metric.variables],
            "optimizer": [v for o in optimizers_of(model) for part in [o, *parts_of(o)] for v in part.variables],
        }
        seen: set[int] = set()
        variables: dict[str, Any] = {}
        for group, members in groups.items():
            own = [v for v in members if not (id(v) in seen or seen.add(id(v)))]
            variables.update({f"{group}/{i}": variable for i, variable in enumerate(own)})
        return variables

    @functools.cached_property
    def description(self) -> dict[str, list]:
        """Path, shape and dtype of every variable; those of a backup have to be the same."""
        description = {
            name: [v.path, list(v.shape), keras.backend.standardize_dtype(v.dtype)]
            for name, v in self._variables.items()
        }
        # Other optimizers may have variables of the same shapes, with another meaning.
        optimizers = [part for optimizer in optimizers_of(self._model) for part in [optimizer, *parts_of(optimizer)]]
        return description | {f"optimizer class/{i}": ["", [], type(o).__name__] for i, o in enumerate(optimizers)}

    @functools.cached_property
    def parts(self) -> frozenset[int]:
        """The ids of all objects whose state this is. Callbacks that refer to one of them need not save it."""
        model, variables = self._model, list(self._variables.values())
        optimizers = [part for optimizer in optimizers_of(model) for part in [optimizer, *parts_of(optimizer)]]
        owners = [model, *model._flatten_layers(), *optimizers, *metrics_of(model), *seed_generators_of(model)]
        within = [part for variable in variables for part in [variable._value, *parts_of_variable(variable)]]
        return frozenset(map(id, [*owners, *variables, *within]))

    def make_global_seed_generator(self, saved: Mapping[str, list]) -> None:
        """Makes the seed generator of `keras.random` now, if it was there when `saved` was: Keras makes it late."""
        if _GLOBAL_SEED in saved:
            with self._model.distribute_strategy.scope():
                global_seed_generator().is_used = True

    def check(self, saved: Mapping[str, list]) -> None:
        """Raises StateMismatchError if the model has other variables than those that were described."""
        for name in dict.fromkeys([*self.description, *saved]):
            received, expected = self.description.get(name), saved.get(name)
            # Paths count a process' layers (dense, dense_1, ...) and may differ where nothing else does.
            if received is None or expected is None or received[1:] != list(expected[1:]):
                raise StateMismatchError(
                    f"The backup is of another model or optimizer. Received: {name} is {_words(received)}. Expected, "
                    f"as saved: {_words(expected)}. Build and compile the model as before, or pass another backup_dir "
                    "to begin anew."
                )

    def snapshot(self, with_metrics: bool) -> dict[str, tf.Tensor]:
        """Current values of all variables, as tensors that later training steps do not change.

        With several workers and `with_metrics` this is a collective: all workers call it at the same step.

        Args:
            with_metrics: whether metrics are in the middle of an epoch, so that their values are needed.
        """
        tensors: dict[str, tf.Tensor] = {}
        per_replica: dict[str, Any] = {}
        for name, variable in self._variables.items():
            if name.startswith("metrics/") and not with_metrics:
                continue
            if is_kept_per_replica(variable):
                per_replica[f"{_PER_REPLICA}/{name}"] = variable
            else:
                # Shares the buffer: TensorFlow copies it when the next step writes to the variable.
                tensors[name] = parts_of_variable(variable)[0].read_value()
        if per_replica:
            values = gather(self._model.distribute_strategy, list(per_replica.values()))
            tensors.update(zip(per_replica, values, strict=True))
        return tensors

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Puts a snapshot back. It may be of another number of replicas, or without any strategy."""
        for name, variable in self._variables.items():
            whole, replicas = tensors.get(name), tensors.get(f"{_PER_REPLICA}/{name}")
            if whole is None and replicas is None:
                continue
            if is_kept_per_replica(variable):
                values = whole[np.newaxis] if replicas is None else replicas
                scatter(self._model.distribute_strategy, variable, values)
                continue
            for part in parts_of_variable(variable):
                part.assign(tf.constant(combine(variable, replicas) if whole is None else whole, dtype=part.dtype))


def _words(description: list | None) -> str:
    if description is None:
        return "not there"
    path, shape, kind = description
    return f"{path} with shape {shape} and dtype {kind}" if path else kind
