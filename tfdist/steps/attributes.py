"""What a model keeps on `self` while its step runs: each replica of this process finds its own.

The replicas of a process are threads that take turns: one computes until it waits for the others, wherever they
exchange something. They share the model's objects. What `call` has put into an attribute, for `compute_loss` say, is
the last replica's by then. So each replica puts back what was there when it began to wait:

replica 0   self.code = a, waits                           self.code = a, reads it
replica 1                         self.code = b, waits                              self.code = b, reads it

A replica begins with what the first one has begun with: a `train_step` that runs eagerly and counts its steps on `self`
counts each once.

These are tensors, numbers, and lists, tuples and dicts, of objects whose class is the user's own: layers, losses,
metrics, and what they hold.
"""

from __future__ import annotations

import collections
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.inspection.model_state import items_of, metrics_of
from tfdist.steps.keras_step import KerasStep, shadowed

_KINDS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, keras.KerasTensor, int, float)
_CONTAINERS = (list, tuple, dict)
# Packages of classes that keep nothing of a replica in their attributes.
_OTHERS = {"keras", "keras_hub", "tfdist", "tensorflow", "numpy", *sys.stdlib_module_names}
# Longer lists are no place for what a step has computed: vocabularies, say.
_LONGEST = 1000


def reached_from(model: keras.Model) -> list[Any]:
    """The layers and metrics of a model, and of objects of a user's own classes in their attributes, and these."""
    found, waiting = {}, [*model._flatten_layers(), *metrics_of(model)]
    for one in waiting:  # which grows
        if id(one) not in found:
            found[id(one)] = one
            held = [item for item in items_of(vars(one)) if id(item) not in found]
            waiting += [item for item in held if is_users(item) or isinstance(item, (keras.Layer, keras.Metric))]
    return list(found.values())


def owners_of(model: keras.Model) -> list[Any]:
    """Those of a user's own classes."""
    return list(filter(is_users, reached_from(model)))


def is_users(one: Any) -> bool:
    """Whether something is an object of a user's own class, which has attributes."""
    return str(type(one).__module__).partition(".")[0] not in _OTHERS and hasattr(one, "__dict__")


@contextlib.contextmanager
def of_each_replica(step: KerasStep) -> Iterator[None]:
    """While the block runs on a replica, it finds its own attributes of the model's objects after each meeting."""
    context = tf.distribute.get_replica_context()
    if len(context.strategy.extended.worker_devices) == 1 or not (owners := owners_of(step.model)):
        yield
        return
    if step.begun is None:
        step.begun = kept(owners)
    else:
        step.begun(changed_only=True)  # what is set once, by the first one, the others find
    merge_call = context.merge_call

    def meet(*args: Any, **kwargs: Any) -> Any:
        put_back = kept(owners)
        result = merge_call(*args, **kwargs)
        put_back()
        return result

    with shadowed(context, merge_call=meet):
        yield


@contextlib.contextmanager
def built_quietly(model: keras.Model) -> Iterator[None]:
    """While the block builds a model by calling it, and its steps, what these count does not change."""
    put_back = kept(owners_of(model))
    try:
        yield
    finally:
        put_back(changed_only=True)


def kept(owners: Iterable[Any]) -> Callable[..., None]:
    """A function that puts back the tensors and numbers that objects have now, but of those that were built since.

    With `changed_only` it does so where there was one before, and is another one now.
    """
    before = [(one, getattr(one, "built", None), dict(vars(one)), _copies(vars(one))) for one in owners]

    def put_back(changed_only: bool = False) -> None:
        for one, was_built, values, containers in before:
            if was_built is False and one.built:
                continue
            for name in set(vars(one)).difference(values):
                if hasattr(type(one), name) and _is_kept(vars(one)[name]):
                    del vars(one)[name]  # what its class has was the value before
            for name, value in values.items():
                other = vars(one).get(name)
                is_new = value is None or other is None
                if other is not value and not (changed_only and is_new) and _is_of_replica(value, other):
                    vars(one)[name] = value  # past Keras' attribute tracking
            for container, items in containers:
                _put_back(container, items)

    return put_back


def _copies(attributes: dict[str, Any]) -> list[tuple[list | dict, list | dict]]:
    """The lists and dicts in attributes, at any depth, and what they contain."""
    found: dict[int, Any] = {}
    waiting = list(attributes.values())
    while waiting:
        one = waiting.pop()
        if isinstance(one, _CONTAINERS) and id(one) not in found and len(one) <= _LONGEST:
            found[id(one)] = one
            waiting += _items(one)
    changeable = [one for one in found.values() if not isinstance(one, tuple)]
    return [(one, dict(one) if isinstance(one, dict) else list(one)) for one in changeable]


def _is_of_replica(value: Any, other: Any) -> bool:
    """Whether two values of an attribute may be those of two replicas."""
    if isinstance(value, _CONTAINERS) and isinstance(other, _CONTAINERS):
        return True
    return any(map(_is_kept, items_of([value, other])))


def _items(value: list | tuple | dict) -> list[Any]:
    return list(value.values() if isinstance(value, dict) else value)


def _is_kept(value: Any) -> bool:
    return isinstance(value, _KINDS) and not isinstance(value, bool)


def _put_back(container: list | dict, items: list | dict) -> None:
    """Lets a list or a dict contain what it did, if tensors or numbers have come or gone."""
    now, then = _items(container), _items(items)
    is_same = len(now) == len(then) and all(one is other for one, other in zip(now, then, strict=True))
    if is_same or not any(map(_is_kept, items_of([now, then]))):
        return
    # Methods of these classes, not Keras' subclasses, which would track what is put in.
    kind = next(one for one in (collections.OrderedDict, dict, list) if isinstance(container, one))
    kind.clear(container)
    (list.extend if kind is list else kind.update)(container, items)
