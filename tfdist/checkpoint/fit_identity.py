"""What tells one fit from another: the model's architecture, its optimizers, and what it was compiled with.

A backup folder of another fit must not be taken for one of this fit. Compared is what Keras can serialise; what it
cannot (lambdas, layers without `get_config`) counts by its name. Names with counters (dense_4) are numbered anew, and
seeds are left out, since the states of all seed generators are in the backup.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import keras

from tfdist.compat.upstream import Functional
from tfdist.inspection.model_parts import optimizers_of
from tfdist.runtime.server_process import end
from tfdist.supervision.events import EventLog
from tfdist.supervision.exit_codes import REFUSED

_COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
# Where a class is defined, what a batch looked like, and seeds: they do not tell one model from another.
_LEFT_OUT = ("module", "registered_name", "shared_object_id", "build_config", "build_input_shape", "seed")
_LONGEST = 64
_RATE = "learning_rate"
_VERSION = "keras"

# The fits that have begun in this process, and may have failed: the training has changed the learning rate since.
_begun: weakref.WeakKeyDictionary[keras.Model, tuple[str, weakref.ref, dict]] = weakref.WeakKeyDictionary()


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

    def is_exempt(path: str, one: Any, other: Any) -> bool:
        if path == "replicas":
            return True
        if not path.startswith("optimizers") or not all(type(value) in (int, float) for value in (one, other)):
            return False
        return scaled or (more_epochs and f"{_RATE}." in path)

    if saved.get(_VERSION) != now.get(_VERSION):
        saved, now = _what_both_have(saved, now), _what_both_have(now, saved)
    return next(_differences(saved, now, "", is_exempt), None)


def _what_both_have(one: Any, other: Any) -> Any:
    """A configuration without the keys that the other one lacks."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: _what_both_have(one[key], other[key]) for key in one if key in other and key != _VERSION}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return [_what_both_have(*pair) for pair in zip(one, other, strict=True)]
    return one


def _differences(saved: Any, now: Any, path: str, is_exempt: Callable[[str, Any, Any], bool]) -> Iterator[str]:
    if isinstance(saved, dict) and isinstance(now, dict):
        for key in dict.fromkeys([*now, *saved]):
            yield from _differences(saved.get(key), now.get(key), f"{path}.{key}".lstrip("."), is_exempt)
    elif isinstance(saved, list) and isinstance(now, list) and len(saved) == len(now):
        for number, (one, other) in enumerate(zip(saved, now, strict=True)):
            yield from _differences(one, other, f"{path}[{number}]", is_exempt)
    elif repr(saved) != repr(now) and not is_exempt(path, saved, now):  # not a number is equal to itself here
        yield f"Received: {path} is {_words(now)}. Expected, as saved: {_words(saved)}."


def _words(value: Any) -> str:
    if isinstance(value, dict) and "class_name" in value:
        return value["class_name"]
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return f"[{', '.join(map(_words, value))}]"
    return repr(value)


# Which of the fits with the same backup folder this is: a script may call `fit` several times.

_finished: dict[str, int] = {}


def folder_of_fit(backup_dir: str) -> str:
    """The folder of the next (or interrupted) fit: `backup_dir` for the first one, then `backup_dir/fit-2`, ...

    A script that is started again makes the same fits in the same order, and finds the finished ones finished.
    """
    number = _finished.get(_key(backup_dir), 0) + 1
    return backup_dir if number == 1 else f"{backup_dir.rstrip('/')}/fit-{number}"


def note_finished(backup_dir: str) -> None:
    """Notes that a fit with this folder has come to its end in this process."""
    _finished[_key(backup_dir)] = _finished.get(_key(backup_dir), 0) + 1


def remove_if_empty(backup_dir: str) -> None:
    """Removes the folder of the fit that ends, if nothing is left in it. Call it before `note_finished`."""
    for folder in dict.fromkeys([folder_of_fit(backup_dir), backup_dir]):
        with contextlib.suppress(OSError):  # another job may write to it by now; remote stores have no folders
            os.rmdir(folder)


def _key(backup_dir: str) -> str:
    return backup_dir if "://" in backup_dir else os.path.abspath(backup_dir)


# How a program ends that cannot train here: its exit code says that it should not be started again.

_Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


def is_final(error: BaseException) -> BaseException:
    """Makes the program end with exit code 78 if it does not catch an exception.

    `tfdist run` and `tfdist submit` do not start it again then.

    Args:
        error: the exception, which is about to be raised.

    Example:
        >>> raise is_final(RuntimeError("another training writes there"))  # doctest: +SKIP
    """
    sys.excepthook = functools.partial(_show, error, sys.excepthook)
    return error


def _show(
    final: BaseException, before: _Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """In place of `sys.excepthook`."""
    before(kind, error, trace)
    if error is final:
        EventLog.from_environment().write("refused", reason=str(error), exit_code=REFUSED)
        end(REFUSED)
