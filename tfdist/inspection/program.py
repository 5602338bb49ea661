"""What a process is about to train, in words that all processes of one program have in common.

Names, seeds and addresses stay out of it: a model that one process builds beside the others' changes how Keras counts
names. So do callbacks, of which some are the chief's alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.inspection.model_state import optimizers_of

_OF_FIT = (
    *("epochs", "initial_epoch", "steps_per_epoch", "batch_size", "class_weight", "validation_split"),
    *("validation_steps", "validation_batch_size", "validation_freq"),
)
# How a step runs (run_eagerly, jit_compile) may depend on the host.
_OF_COMPILE = ("loss", "loss_weights", "metrics", "weighted_metrics", "steps_per_execution")
_MAY_DIFFER = {"name", "seed", "module", "registered_name", "build_config"}
_INITIAL = "_initializer"  # initial values are the chief's
_ADDRESS = re.compile(r"0x[0-9a-f]+")


def program_of(
    method: Callable, model: keras.Model, args: Sequence[Any], kwargs: Mapping[str, Any], own_settings: bool
) -> dict[str, Any]:
    """Describes a call of a method of a model; of `fit`, what it trains. As JSON can hold it.

    Args:
        method: such as `fit`.
        model: a compiled model, which need not be built.
        args: what the method is given.
        kwargs: what it is given by name.
        own_settings: whether each process may give its optimizers settings of its own.
    """
    if method.__name__ != "fit":
        return {"call": method.__name__}
    bound = inspect.signature(method).bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    compiled = model._compile_config.config if model.compiled else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lambdas, which no file can have
        return {
            "call": "fit",
            **{name: described(arguments.get(name)) for name in _OF_FIT},
            "validation_data": arguments.get("validation_data") is not None,
            **{name: described(compiled.get(name)) for name in _OF_COMPILE},
            "optimizers": [described(type(one) if own_settings else one) for one in optimizers_of(model)],
            "layers": [_described_layer(layer) for layer in model._flatten_layers()],
            "weights": [f"{v.dtype} {tuple(v.shape)}{'' if v.trainable else ', frozen'}" for v in model.weights],
        }


def check_same_program(names: Sequence[str], programs: Sequence[Any]) -> None:
    """Compares what processes are about to do.

    Args:
        names: of the processes.
        programs: what `program_of` has said on each.

    Raises:
        ValueError: with the first difference.

    Example:
        >>> four, eight = ({"layers": [{"units": units}]} for units in (4, 8))
        >>> check_same_program(["worker 0", "worker 1"], [four, eight])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: The processes run different programs. Received: units of layers[0]: worker 0: 4; worker 1: 8. ...
    """
    found = _first_difference(programs)
    if found is None:
        return
    keys, values = found
    places: list[str] = []
    for key in keys:
        if isinstance(key, int):
            places[-1] += f"[{key}]"
        else:
            places.append(key)
    listing = "; ".join(f"{name}: {_shown(value)}" for name, value in zip(names, values, strict=True))
    raise ValueError(
        f"The processes run different programs. Received: {' of '.join(reversed(places))}: {listing}. Expected: the "
        "same model, compile(...) and fit(...) on every process. Look for what depends on the rank, on the host, or on "
        "a random number."
    )


def _first_difference(values: Sequence[Any], *place: str | int) -> tuple[tuple[str | int, ...], Sequence[Any]] | None:
    if all(value == values[0] for value in values):
        return None
    if all(isinstance(value, dict) for value in values):
        parts = {key: [value.get(key) for value in values] for value in values for key in value}
    elif all(isinstance(value, list) for value in values):
        parts = dict(enumerate(itertools.zip_longest(*values)))
    else:
        return place, values
    return next(filter(None, (_first_difference(of_all, *place, key) for key, of_all in parts.items())), None)


def _shown(value: Any) -> str:
    """A value in a message; of an object its class says enough."""
    return repr(value.get("class", value) if isinstance(value, dict) else value)[:200]


def _described_layer(layer: keras.layers.Layer) -> Any:
    # A program's own class may be told the rank, to log it, say; and a model's settings are those of its layers.
    is_keras = type(layer).__module__.startswith("keras.") and not isinstance(layer, keras.Model)
    return {**described(layer if is_keras else type(layer)), "compute_dtype": layer.compute_dtype}


def described(value: Any) -> Any:
    """A value as JSON can hold it, without what may differ between the processes of one program.

    Example:
        >>> described([0.1, len, np.float32(2), keras.initializers.Constant(3)])
        [0.1, {'class': 'len'}, 2.0, {'class': 'Constant', 'value': 3}]
    """
    if isinstance(value, tf.Tensor):
        value = tf.get_static_value(value)
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _ADDRESS.sub("0x", value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):  # hosts may compute it with other last bits
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return _described_mapping(value)
    if isinstance(value, (list, tuple)):
        return [described(one) for one in value]
    if isinstance(value, functools.partial):
        return {"class": "partial", "of": described([value.func, value.args, value.keywords])}
    if hasattr(value, "__qualname__"):  # a class or a function
        return {"class": value.__qualname__}
    try:
        return {"class": type(value).__qualname__, **described(value.get_config())}
    except Exception:  # not all can say it
        return {"class": type(value).__qualname__}


def _described_mapping(value: Mapping[Any, Any]) -> Any:
    items = ((str(key), one) for key, one in value.items())
    own = {key: one for key, one in items if key not in _MAY_DIFFER and not key.endswith(_INITIAL)}
    if own.keys() != {"class_name", "config"}:
        return {key: described(one) for key, one in own.items()}
    # Keras' form of an object; that of a lambda are bytes that differ from process to process.
    has_settings = isinstance(own["config"], Mapping) and own["class_name"] != "__lambda__"
    name = own["class_name"] if isinstance(own["config"], Mapping) else own["config"]
    return {"class": name, **(described(own["config"]) if has_settings else {})}
