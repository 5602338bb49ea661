"""The state of a model in training as tensors, which are taken quickly, written later and put back exactly.

Weights, seeds, optimizer, metrics, and what compression has not sent yet. Variables that every replica keeps by itself
(metrics in the middle of an epoch) are saved replica by replica: their sum, put back in parts, would round differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.hooks import hooks_of
from tfdist.compat.upstream import global_seed_generator
from tfdist.inspection import random_state
from tfdist.inspection.global_seeds import is_used
from tfdist.inspection.model_parts import metrics_of, optimizers_of, parts_of, seed_generators_of
from tfdist.inspection.replica_values import combine, gather, is_kept_per_replica, parts_of_variable, scatter

_PER_REPLICA = "replicas"
_COMPRESSION = "compression"
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
        self._lost: set[str] = set()  # what a backup has of compression, and this has no place for

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

    @property
    def _of_compression(self) -> dict[str, Any]:
        """What compression keeps, by name; it is made in the first step."""
        strategy = self._model.distribute_strategy
        compressor = hooks_of(strategy).compressor
        if compressor is None or strategy.num_replicas_in_sync == 1:
            return {}
        return {
            f"{_COMPRESSION}/{i}/{name}": variable
            for i, optimizer in enumerate(optimizers_of(self._model))
            for name, variable in compressor.variables_of(optimizer).items()
        }

    @property
    def description(self) -> dict[str, list]:
        """Path, shape and dtype of every variable; but for those of compression, a backup's have to be the same."""
        return self._fixed_description | _described(self._of_compression)

    @functools.cached_property
    def _fixed_description(self) -> dict[str, list]:
        description = _described(self._variables)
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

    def make_compression(self, saved: Mapping[str, list], tensors: Collection[str]) -> list[str]:
        """Makes what compression had kept when `saved` was described, where this strategy compresses in that way.

        Args:
            saved: the description in the backup.
            tensors: the names of what it has values of.

        Returns:
            The names of what is lost: it has no place here, or no value.
        """
        names = [name for name in saved if name.startswith(f"{_COMPRESSION}/")]
        strategy, optimizers = self._model.distribute_strategy, optimizers_of(self._model)
        compressor = hooks_of(strategy).compressor
        if compressor is not None and strategy.num_replicas_in_sync > 1 and self._variables:  # it builds optimizers
            for optimizer in optimizers:
                compressor.reset(optimizer)
            with strategy.scope():
                for name in names:
                    number, _, rest = name.removeprefix(f"{_COMPRESSION}/").partition("/")
                    if number.isdecimal() and int(number) < len(optimizers):
                        compressor.make(optimizers[int(number)], rest, saved[name][1])
        made = _described(self._of_compression)
        self._lost = {
            name
            for name in names
            if made.get(name, [None])[1:] != list(saved[name][1:])
            or not {name, f"{_PER_REPLICA}/{name}"}.intersection(tensors)
        }
        return sorted(self._lost)

    def check(self, saved: Mapping[str, list], tensors: Collection[str], with_metrics: bool) -> None:
        """Raises StateMismatchError if the model has other variables than those that were described, and have values.

        Args:
            saved: the description in the backup.
            tensors: the names of what it has values of.
            with_metrics: as of the `snapshot`.
        """
        description = self._fixed_description
        for name in dict.fromkeys([*description, *saved]):
            if name.startswith(f"{_COMPRESSION}/"):
                continue
            received, expected = description.get(name), saved.get(name)
            # Paths count a process' layers (dense, dense_1, ...) and may differ where nothing else does.
            if received is None or expected is None or received[1:] != list(expected[1:]):
                raise StateMismatchError(
                    f"The backup is of another model or optimizer. Received: {name} is {_words(received)}. Expected, "
                    f"as saved: {_words(expected)}. Build and compile the model as before, or pass another backup_dir "
                    "to begin anew."
                )
        for name in self._variables:
            is_needed = with_metrics or not name.startswith("metrics/")
            if is_needed and name not in tensors and f"{_PER_REPLICA}/{name}" not in tensors:
                raise StateMismatchError(
                    f"Received: a backup without a value of {name}, {_words(description[name])}. Expected: one of "
                    "every variable. Use another backup, or pass another backup_dir to begin anew."
                )

    def snapshot(self, with_metrics: bool, is_kept: bool = True) -> dict[str, tf.Tensor]:
        """Current values of all variables, as tensors that later training steps do not change.

        With several workers, and `with_metrics` or compression, this is a collective: all call it at the same step.

        Args:
            with_metrics: whether metrics are in the middle of an epoch, so that their values are needed.
            is_kept: whether this process needs what compression keeps on all replicas, as much as all their weights.
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
        for name, variable in self._of_compression.items():
            if not is_kept_per_replica(variable):
                tensors[name] = parts_of_variable(variable)[0].read_value()
                continue
            # One after another: nobody but who writes has to have room for all.
            (value,) = gather(self._model.distribute_strategy, [variable])
            if is_kept:
                tensors[f"{_PER_REPLICA}/{name}"] = value
        return tensors

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Puts a snapshot back. It may be of another number of replicas, or without any strategy."""
        for name, variable in (self._variables | self._of_compression).items():
            whole, replicas = tensors.get(name), tensors.get(f"{_PER_REPLICA}/{name}")
            if name in self._lost or (whole is None and replicas is None):
                continue
            if is_kept_per_replica(variable):
                values = whole[np.newaxis] if replicas is None else replicas
                scatter(self._model.distribute_strategy, variable, values)
                continue
            for part in parts_of_variable(variable):
                part.assign(tf.constant(combine(variable, replicas) if whole is None else whole, dtype=part.dtype))


def _described(variables: Mapping[str, Any]) -> dict[str, list]:
    return {name: [v.path, list(v.shape), keras.backend.standardize_dtype(v.dtype)] for name, v in variables.items()}


def _words(description: list | None) -> str:
    if description is None:
        return "not there"
    path, shape, kind = description
    return f"{path} with shape {shape} and dtype {kind}" if path else kind


# The rest of a backup: what `FitBackup` writes beside the tensors, as JSON.


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_seed(value: Any) -> bool:
    return value is None or type(value) is int


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_variables(value: Any) -> bool:
    return isinstance(value, dict) and all(_is_variable(entry) for entry in value.values())


def _is_variable(entry: Any) -> bool:
    return isinstance(entry, list) and list(map(type, entry)) == [str, list, str] and all(map(_is_count, entry[1]))


def _is_callbacks(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) and _has(entry, _CALLBACK) for entry in value)


def _is_position(value: Any) -> bool:
    if not (isinstance(value, dict) and _has(value, _POSITION)):
        return False
    begin = value.get("random at begin")
    return begin is None or random_state.is_state(begin)


def _is_lengths(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _has(entry: Mapping[str, Any], fields: Mapping[str, Callable[[Any], bool]]) -> bool:
    return all(name in entry and fits(entry[name]) for name, fits in fields.items())


_CALLBACK: dict[str, Callable[[Any], bool]] = {
    "class": lambda value: isinstance(value, str),
    "compares": _is_flag,
    "settings": _is_object,
    "state": lambda value: True,  # `plain_data.decode` looks into it
    "unsaved": lambda value: isinstance(value, list),
}
_POSITION: dict[str, Callable[[Any], bool]] = {
    "made": _is_count,
    "taken": _is_count,
    "steps": _is_count,
    "goes on": _is_flag,
    "batches": lambda value: value is None or _is_count(value),
    "facts": _is_object,
    "array seed": _is_seed,
    "global seed": _is_seed,
}
_META: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("epoch", "steps", "total", "validations", "epochs"), _is_count),
    **dict.fromkeys(("done", "stopped"), _is_flag),
    "seed": _is_seed,
    "variables": _is_variables,
    "identity": _is_object,
    "callbacks": _is_callbacks,
    "csv": _is_lengths,
    "position": _is_position,
    "random": random_state.is_state,
}


def fault_of_meta(meta: Mapping[str, Any]) -> str | None:
    """Which part of a backup's meta data is not what a fit has written; `None` if all of it is.

    Example:
        >>> fault_of_meta({"epoch": -1})
        'its epoch is -1'
    """
    for name, fits in _META.items():
        if name not in meta:
            return f"it has no {name}"
        if not fits(meta[name]):
            text = ascii(meta[name])
            return f"its {name} is {text if len(text) <= 60 else text[:60] + '...'}"
    return None


def check_meta(meta: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if the checkpoint at a path is not one that a fit has written."""
    if fault := fault_of_meta(meta):
        raise ValueError(
            f"{path} is not a backup of a fit: {fault}. Move it to another folder to go on without it, or pass another "
            "backup_dir."
        )
