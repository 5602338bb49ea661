"""The state of a model in training as tensors, which are taken quickly, written later and put back exactly.

Weights, seeds, optimizer, metrics, and what compression has not sent yet. Variables that every replica keeps by itself
(metrics in the middle of an epoch) are saved replica by replica: their sum, put back in parts, would round differently.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import re
import reprlib
import types
import warnings
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.checkpoint.callback_state import kept_by_keras
from tfdist.checkpoint.store import ROWS
from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import (
    DistributedVariable,
    Functional,
    get_read_write_resource_inputs,
    global_seed_generator,
)
from tfdist.inspection.model_state import (
    all_optimizers_of,
    combine,
    gather,
    is_kept_per_replica,
    is_random_state,
    is_sharded,
    is_used,
    items_of,
    metrics_of,
    optimizers_of,
    own_copy,
    parts_of,
    parts_of_variable,
    scatter,
    seed_generators_of,
)
from tfdist.json_schema import ANY_OBJECT, NOTHING, anything, check, is_count
from tfdist.steps.attributes import owners_of, reached_from
from tfdist.steps.gradients import buckets

_PER_REPLICA = "replicas"
_COMPRESSION = "compression"
# Variables that Keras does not list; earlier versions did not save them.
_UNLISTED = "unlisted"
# How much of each process is gathered at once.
_PART_BYTES = 64 << 20
# All other seed generators belong to a layer, and their states to the model's variables.
_GLOBAL_SEED = "seeds/0"

_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
# Where a class is defined, what a batch looked like, and seeds: they do not tell one model from another.
_LEFT_OUT = ("module", "registered_name", "shared_object_id", "build_config", "build_input_shape", "seed")
_LONGEST = 64
_VARIABLES = (keras.Variable, tf.Variable)
_GENERATORS = (keras.random.SeedGenerator, tf.random.Generator)
_RATE = "learning_rate"
_VERSION = "keras"

# The fits that have begun in this process, and may have failed: the training has changed the learning rate since.
_begun: weakref.WeakKeyDictionary[keras.Model, tuple[str, weakref.ref, dict]] = weakref.WeakKeyDictionary()


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
            "optimizer": [variable for optimizer in all_optimizers_of(model) for variable in optimizer.variables],
            "strategy": hooks_of(model.distribute_strategy).more_state(model),
            "of losses and optimizers": _held_by_others(model),
            _UNLISTED: _unlisted(model),
        }
        seen: set[int] = set()
        variables: dict[str, Any] = {}
        for group, members in groups.items():
            own = [v for v in members if not (id(v) in seen or seen.add(id(v)))]
            seen.update(id(_behind(v)) for v in own)
            variables.update({f"{group}/{i}": variable for i, variable in enumerate(own)})
        return variables

    @property
    def is_in_parts(self) -> bool:
        """Whether each process has a part of it."""
        return any(map(is_sharded, self._variables.values()))

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
        names = [type(optimizer).__name__ for optimizer in all_optimizers_of(self._model)]
        return description | {f"optimizer class/{i}": ["", [], name] for i, name in enumerate(names)}

    @functools.cached_property
    def parts(self) -> frozenset[int]:
        """The ids of all objects whose state this is. Callbacks that refer to one of them need not save it."""
        model, variables = self._model, list(self._variables.values())
        owners = [model, *model._flatten_layers(), *all_optimizers_of(model), *metrics_of(model)]
        within = [part for v in variables for part in [_behind(v), *parts_of_variable(v)]]
        return frozenset(map(id, [*owners, *seed_generators_of(model), *variables, *within]))

    def make_global_seed_generator(self, saved: Mapping[str, list]) -> None:
        """Makes the seed generator of `keras.random` now, if it was there when `saved` was: Keras makes it late."""
        if _GLOBAL_SEED in saved:
            with self._model.distribute_strategy.scope():
                global_seed_generator().is_used = True

    def lacks(self, saved: Mapping[str, list]) -> bool:
        """Whether something is in `saved` that is not here: slots that the first step makes, say."""
        return any(name not in self._fixed_description for name in saved if not name.startswith(f"{_COMPRESSION}/"))

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

    def leave_unlisted(self, saved: Mapping[str, list]) -> list[str]:
        """Decides to leave all variables that Keras does not list as they are, if `saved` has others than this model.

        A layer may make one in the first step only, and an earlier version has saved none.

        Returns:
            The paths of what is left, here and in the backup.
        """
        here, there = (
            {name: list(one) for name, one in description.items() if name.startswith(f"{_UNLISTED}/")}
            for description in (self._fixed_description, saved)
        )
        if {name: one[1:] for name, one in here.items()} == {name: one[1:] for name, one in there.items()}:
            return []
        self._lost |= here.keys()
        return list(dict.fromkeys(path for path, *_ in [*here.values(), *there.values()]))

    def check(self, saved: Mapping[str, list], tensors: Collection[str], with_metrics: bool) -> None:
        """Raises StateMismatchError if the model has other variables than those that were described, and have values.

        Args:
            saved: the description in the backup.
            tensors: the names of what it has values of.
            with_metrics: as of the `snapshot`.
        """
        description = self._fixed_description
        for name in dict.fromkeys([*description, *saved]):
            if name.startswith((f"{_COMPRESSION}/", f"{_UNLISTED}/")):
                continue
            received, expected = description.get(name), saved.get(name)
            # Paths count a process' layers (dense, dense_1, ...) and may differ where nothing else does.
            if received is None or expected is None or received[1:] != list(expected[1:]):
                raise StateMismatchError(
                    f"The backup is of another model or optimizer. Received: {name} is {_words(received)}. Expected, "
                    f"as saved: {_words(expected)}. Build and compile the model as before, or pass another backup_dir "
                    "to start over."
                )
        in_rows = _pieces(tensors)
        for name in self._variables:
            is_needed = name not in self._lost and (with_metrics or not name.startswith("metrics/"))
            if is_needed and not in_rows.get(name) and not {name, f"{_PER_REPLICA}/{name}"}.intersection(tensors):
                raise StateMismatchError(
                    f"Received: a backup without a value of {name}, {_words(description[name])}. Expected: one of "
                    "every variable. Use another backup, or pass another backup_dir to start over."
                )

    def snapshot(self, with_metrics: bool, is_kept: bool = True) -> dict[str, tf.Tensor]:
        """Current values of all variables, as tensors that later training steps do not change.

        With several workers, and `with_metrics`, compression or weights of each worker's own, this is a collective: all
        call it at the same step.

        Args:
            with_metrics: whether metrics are in the middle of an epoch, so that their values are needed.
            is_kept: whether this process writes more than its rows of sharded variables. What compression keeps on all
                replicas is as much as all their weights.
        """
        strategy = self._model.distribute_strategy
        keeps_own = hooks_of(strategy).keeps_own
        tensors: dict[str, tf.Tensor] = {}
        per_replica: dict[str, Any] = {}
        of_each: dict[str, Any] = {}
        for name, variable in self._variables.items():
            if name.startswith("metrics/") and not with_metrics:
                continue
            if is_kept_per_replica(variable):
                per_replica[f"{_PER_REPLICA}/{name}"] = variable
            elif is_sharded(variable):
                rows = _behind(variable).own_rows()
                tensors.update({f"{ROWS}{name}/{first}": value for first, value in rows.items()})
            elif keeps_own and isinstance(_behind(variable), DistributedVariable):
                of_each[f"{_PER_REPLICA}/{name}"] = variable
            else:
                # Shares the buffer: TensorFlow copies it when the next step writes to the variable.
                tensors[name] = own_copy(variable).read_value()
        if per_replica:
            values = gather(strategy, list(per_replica.values()))
            tensors.update(zip(per_replica, values, strict=True))
        # A part after another: nobody but who writes has to have room for all.
        names, variables = list(of_each), list(of_each.values())
        for part in buckets([tf.TensorSpec(v.shape, v.dtype) for v in variables], _PART_BYTES):
            values = gather(strategy, [variables[i] for i in part])
            if is_kept:
                tensors.update(zip([names[i] for i in part], values, strict=True))
        for name, variable in self._of_compression.items():
            if not is_kept_per_replica(variable):
                tensors[name] = own_copy(variable).read_value()
                continue
            (value,) = gather(strategy, [variable])
            if is_kept:
                tensors[f"{_PER_REPLICA}/{name}"] = value
        return tensors if is_kept else {name: v for name, v in tensors.items() if name.startswith(ROWS)}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Puts a snapshot back. It may be of another number of replicas, or without any strategy."""
        strategy = self._model.distribute_strategy
        keeps_own, in_rows, is_of_others = hooks_of(strategy).keeps_own, _pieces(tensors), False
        for name, variable in (self._variables | self._of_compression).items():
            whole, replicas = tensors.get(name), tensors.get(f"{_PER_REPLICA}/{name}")
            if name in in_rows:
                pieces = {first: tensors[key] for first, key in in_rows[name].items()}
                if is_sharded(variable):
                    _behind(variable).assign_rows(functools.partial(rows_between, pieces))
                    continue
                shape = tuple(variable.shape)
                whole = np.concatenate(list(pieces.values())).reshape(-1)[: int(np.prod(shape))].reshape(shape)
            if name in self._lost or (whole is None and replicas is None):
                continue
            if is_kept_per_replica(variable) or (keeps_own and replicas is not None):
                values = whole[np.newaxis] if replicas is None else replicas
                scatter(strategy, variable, values)
                is_of_others |= len(values) != strategy.num_replicas_in_sync
                continue
            if is_sharded(variable):
                _behind(variable).assign(whole)
                continue
            for part in parts_of_variable(variable):
                part.assign(tf.constant(combine(variable, replicas) if whole is None else whole, dtype=part.dtype))
        if keeps_own:
            hooks_of(strategy).restored(self._model, is_of_others)


def _pieces(tensors: Collection[str]) -> dict[str, dict[int, str]]:
    """Of each variable that is there in rows, of any number of replicas: the names of its tensors, by the first row."""
    found: dict[str, dict[int, str]] = {}
    for key in tensors:
        if key.startswith(ROWS):
            name, _, first = key.removeprefix(ROWS).rpartition("/")
            found.setdefault(name, {})[int(first)] = key
    return {name: dict(sorted(pieces.items())) for name, pieces in found.items()}


def rows_between(pieces: Mapping[int, np.ndarray], begin: int, end: int) -> np.ndarray:
    """Rows of a whole that is there in pieces, by their first rows, in order.

    Example:
        >>> rows_between({0: np.array([[0], [1]]), 2: np.array([[2], [3]])}, 1, 3).tolist()
        [[1], [2]]
    """
    parts = [rows[max(begin - first, 0) : max(end - first, 0)] for first, rows in pieces.items()]
    return np.concatenate(parts)


def _held_by_others(model: keras.Model) -> list[keras.Variable]:
    """Variables and seeds of losses, and seeds of optimizers: Keras lists those of layers alone."""
    items = (item for layer in model._flatten_layers() for item in items_of(vars(layer)))
    losses = [item for item in items if isinstance(item, keras.losses.Loss)]
    held = [item for owner in (*losses, *all_optimizers_of(model)) for item in items_of(vars(owner))]
    seeds = [item.state for item in held if isinstance(item, keras.random.SeedGenerator)]
    own = [item for loss in losses for item in items_of(vars(loss)) if isinstance(item, keras.Variable)]
    return [*own, *seeds]


def _unlisted(model: keras.Model) -> list[Any]:
    """Variables, and states of random numbers, that Keras does not list, but for those that are text.

    They are attributes of layers, such as the states of a recurrent layer, and of the objects that these refer to:
    a regulariser, a `tf.Module`, a schedule of learning rates, a helper with a network and an optimizer of its own.
    """
    held = [item for one in reached_from(model) for item in items_of(vars(one))]
    found = [item for item in held if isinstance(item, keras.optimizers.Optimizer)]
    optimizers = [part for optimizer in found for part in (optimizer, *parts_of(optimizer))]
    rates = [getattr(optimizer, "_learning_rate", None) for optimizer in optimizers]
    schedules = [rate for rate in rates if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule)]
    held += [variable for optimizer in optimizers for variable in optimizer.variables]
    held += [item for schedule in schedules for item in items_of(vars(schedule))]
    variables = [item.state if isinstance(item, _GENERATORS) else item for item in held]
    return [v for v in variables if isinstance(v, _VARIABLES) and _behind(v) is not None and _is_of_numbers(v)]


def changed_elsewhere(model: keras.Model) -> list[str]:
    """The names of variables that the traced step of a training without a strategy changes, and that no backup has."""
    step = model.train_function
    held = inspect.getclosurevars(step).nonlocals if isinstance(step, types.FunctionType) else {}
    function = held.get("multi_step_on_iterator")
    if not isinstance(function, tf.types.experimental.PolymorphicFunction):
        return []
    known, names = TrainingState(model).parts, []
    for concrete in function._list_all_concrete_functions():
        inputs = {id(outer): inner.name for outer, inner in concrete.graph.captures}
        written = {
            one.name
            for operation in concrete.graph.get_operations()
            for one in get_read_write_resource_inputs(operation)[1]
        }
        others = [v for v in concrete.graph.variables if id(v) not in known]
        names += [variable.name for variable in others if inputs.get(id(variable.handle)) in written]
    return list(dict.fromkeys(names))


def plain_attributes(model: keras.Model) -> dict[tuple[int, str], str]:
    """The numbers and texts that a user's own classes keep, by the object and by class and name."""
    return {
        (id(one), f"{type(one).__name__}.{name}"): repr(value)
        for one in owners_of(model)
        for name, value in vars(one).items()
        if isinstance(value, (bool, int, float, str))
        if not name.startswith(("_self_", "_tfdist_")) and name not in kept_by_keras(type(one))
    }


def _is_of_numbers(variable: Any) -> bool:
    dtype = tf.as_dtype(variable.dtype)
    return dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype.is_complex


def _behind(variable: Any) -> Any:
    """TensorFlow's variable behind a Keras one, or itself."""
    return getattr(variable, "_value", variable)


def _described(variables: Mapping[str, Any]) -> dict[str, list]:
    return {
        name: [getattr(v, "path", v.name), _shape_of(v), keras.backend.standardize_dtype(v.dtype)]
        for name, v in variables.items()
    }


def _shape_of(variable: Any) -> list[int]:
    """Its shape, with 0 for each size that may change; a `tf.Variable` may have such ones."""
    shape = tf.TensorShape(variable.shape)
    return [] if shape.rank is None else [size or 0 for size in shape]


def _words(description: list | None) -> str:
    if description is None:
        return "not there"
    path, shape, kind = description
    return f"{path} with shape {shape} and dtype {kind}" if path else kind


# The rest of a backup: what `FitBackup` writes beside the tensors, as JSON.


def _is_seed(value: Any) -> bool:
    return value is None or type(value) is int


def _is_variable(entry: Any) -> bool:
    return isinstance(entry, list) and list(map(type, entry)) == [str, list, str] and all(map(is_count, entry[1]))


def _is_slot(slot: Any) -> bool:
    return isinstance(slot, list) and 0 < len(slot) < 3 and None not in slot and all(map(_is_seed, slot))


# Earlier versions knew no order, and no number of iterators that were used.
_ORDER = {"order?": [_is_slot], **ANY_OBJECT}
_CALLBACK = {
    **{"class": str, "compares": bool, "settings": ANY_OBJECT, "unsaved": [anything], **ANY_OBJECT},
    "state": anything,  # `callback_state.decode` looks into it
}
_POSITION = {
    **{"made": is_count, "taken": is_count, "steps": is_count, "goes on": bool, "batches": (NOTHING, is_count)},
    **{"facts": ANY_OBJECT, "array seed": _is_seed, "global seed": _is_seed, "used?": is_count, **_ORDER},
    **{"random at begin?": (NOTHING, is_random_state), "glance?": [float]},
}


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= 1


_META = {
    **dict.fromkeys(("epoch", "steps", "total", "validations", "epochs"), is_count),
    **{"done": bool, "stopped": bool, "seed": _is_seed, "variables": {...: _is_variable}, "identity": ANY_OBJECT},
    **{"callbacks": [_CALLBACK], "csv": {...: is_count}, "position": _POSITION, "random": is_random_state},
    **{"validation order?": _ORDER, "shares?": (NOTHING, [_is_share]), "logs?": ANY_OBJECT, "trains?": [bool]},
    **ANY_OBJECT,
}


def fault_of_meta(meta: Mapping[str, Any]) -> str | None:
    """Which part of a backup's meta data is not what a fit has written; `None` if all of it is.

    Example:
        >>> fault_of_meta({"epoch": -1})
        'its steps is missing'
    """
    try:
        check(meta, _META)
    except ValueError as error:
        return str(error)
    return None


def check_meta(meta: Mapping[str, Any], path: str) -> None:
    """Raises ValueError if the checkpoint at a path is not one that a fit has written."""
    if fault := fault_of_meta(meta):
        raise ValueError(
            f"{path} is not a backup of a fit: {fault}. Move it to another folder to go on without it, or pass another "
            "backup_dir."
        )


def identity_of(model: keras.Model, folder: str) -> dict[str, Any]:
    """What identifies the fit that begins, as JSON. A fit that is tried again in this process keeps its identity.

    Args:
        model: before its state is restored.
        folder: of the backups.
    """
    before, optimizer, identity = _begun.get(model, ("", lambda: None, {}))
    if before != folder or optimizer() is None or optimizer() is not model.optimizer:
        identity = _describe(model)
        if model.optimizer is not None:
            _begun[model] = (folder, weakref.ref(model.optimizer), identity)
    return identity


def forget(model: keras.Model) -> None:
    """Notes that a model's fit has ended: the next one begins with the learning rate that this one has left."""
    _begun.pop(model, None)


def trains(model: keras.Model) -> list[bool]:
    """Whether each layer of a model is to be trained."""
    return [bool(layer.trainable) for layer in model._flatten_layers()]


def let_train(model: keras.Model, saved: Sequence[bool]) -> None:
    """Lets train what `trains` has returned in another process, where a callback has frozen layers, or freed them."""
    layers = model._flatten_layers()
    if len(saved) != len(layers) or list(saved) == trains(model):
        return
    for layer, is_trained in zip(layers, saved, strict=True):
        if layer.trainable != is_trained:  # a layer comes before those in it, which it sets, too
            layer.trainable = is_trained
    model.make_train_function(force=True)


def _describe(model: keras.Model) -> dict[str, Any]:
    compiled = getattr(getattr(model, "_compile_config", None), "config", {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of lambdas that cannot be loaded safely
        found = {
            "model": _architecture(model),
            "optimizers": [_configuration(optimizer) for optimizer in optimizers_of(model)],
            **{name: _serialised(compiled.get(name)) for name in _COMPILED},
        }
        found = normalised(found)
    return {**found, "replicas": model.distribute_strategy.num_replicas_in_sync, _VERSION: keras.__version__}


def _architecture(model: keras.Model) -> Any:
    if isinstance(model, (keras.Sequential, Functional)):
        with contextlib.suppress(Exception):  # a layer that has no configuration
            return model.get_config()
    return [_configuration(layer) for layer in model._flatten_layers()]


def _configuration(part: Any) -> dict[str, Any]:
    try:
        return {"class_name": type(part).__name__, "config": part.get_config()}
    except Exception:  # whatever a user's class raises
        return {"class_name": type(part).__name__}


def _serialised(value: Any) -> Any:
    try:
        return keras.saving.serialize_keras_object(value)
    except Exception:
        return value


def normalised(config: Any) -> Any:
    """A configuration as JSON, without the counters in names: the same in every process that makes the same model.

    Example:
        >>> normalised({"name": "dense_7", "config": {"units": (3,), "seed": 5}})
        {'name': 'dense', 'config': {'units': [3]}}
    """
    counts: dict[str, int] = {}
    names: dict[str, str] = {}
    for name in _names_in(config):
        base = re.sub(r"_\d+$", "", name)
        if name not in names:
            number = counts[base] = counts.get(base, -1) + 1
            names[name] = f"{base}_{number}" if number else base
    return json.loads(json.dumps(_plain(config, names)))


def _names_in(config: Any) -> Iterator[str]:
    if isinstance(config, dict):
        if isinstance(config.get("name"), str):
            yield config["name"]
        config = list(config.values())
    if isinstance(config, (list, tuple)):
        for item in config:
            yield from _names_in(item)


def _plain(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":
            return "<lambda>"  # its code tells in which line it stands
        items = {names.get(str(key), str(key)): item for key, item in value.items() if key not in _LEFT_OUT}
        if isinstance(items.get("batch_shape"), (list, tuple)):
            items["batch_shape"] = items["batch_shape"][1:]
        return {key: _plain(item, names) for key, item in items.items()}
    if isinstance(value, (list, tuple)):
        items = [_plain(item, names) for item in value]
        return items if len(items) <= _LONGEST else f"{len(items)} items, {_digest(json.dumps(items))}"
    if isinstance(value, str):
        value = names.get(value, value)
        return value if len(value) <= _LONGEST else f"{len(value)} characters, {_digest(value)}"
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist(), names)
    return getattr(value, "__name__", type(value).__name__)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def difference(saved: dict[str, Any], now: dict[str, Any], more_epochs: bool) -> str | None:
    """The first difference between two identities, in words; `None` if it is the same fit.

    A learning rate may depend on the number of replicas, and a schedule of learning rates on the number of epochs:
    such numbers are not compared if those are different. Nor are options of layers that only one of two versions of
    Keras has.

    Example:
        >>> difference({"optimizers": [{"momentum": 0.9}]}, {"optimizers": [{"momentum": 0.5}]}, more_epochs=False)
        'Received: optimizers[0].momentum is 0.5. Expected, as saved: 0.9.'
    """
    scaled = saved.get("replicas") != now.get("replicas")
    if saved.get(_VERSION) != now.get(_VERSION):
        saved, now = _what_both_have(saved, now), _what_both_have(now, saved)
    for path, one, other in _differences(saved, now, ""):
        is_number = path.startswith("optimizers") and {type(one), type(other)} <= {int, float}
        may_differ = is_number and (scaled or (more_epochs and f"{_RATE}." in path))
        if path != "replicas" and not may_differ:
            return f"Received: {path} is {_shown(other)}. Expected, as saved: {_shown(one)}."
    return None


def _shown(value: Any) -> str:
    return f"{value:.7g}" if isinstance(value, float) else reprlib.repr(value)


def _what_both_have(one: Any, other: Any) -> Any:
    """A configuration without the keys that the other one lacks."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _what_both_have(one[key], other[key]) for key in one if key in other and key != _VERSION}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_what_both_have(*pair) for pair in zip(one, other, strict=True)]
    return one


def _differences(saved: Any, now: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*now, *saved]):
            yield from _differences(saved.get(key), now.get(key), f"{path}.{key}".lstrip("."))
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (one, other) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(one, other, f"{path}[{number}]")
    elif repr(saved) != repr(now):  # not a number is equal to itself here
        yield path, saved, now
