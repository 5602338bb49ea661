"""What a model keeps on `self` while its step runs: each replica of this process finds its own.

The replicas of a process are threads that take turns: one computes until it waits for the others, wherever they
exchange something. They share the model's objects. What `call` has put into an attribute, for `compute_loss` say, is
the last replica's by then. So each replica puts back what was there when it began to wait:

replica 0   self.code = a, waits                           self.code = a, reads it
replica 1                         self.code = b, waits                              self.code = b, reads it

These are tensors, numbers, and lists, tuples and dicts, of objects whose class is not Keras' own.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist.steps.keras_step import shadowed

_KINDS = (tf.Tensor, tf.RaggedTensor, tf.SparseTensor, int, float)
_CONTAINERS = (list, tuple, dict)
# Modules of classes that keep nothing of a replica in their attributes.
_OTHERS = ("keras.", "keras_hub.", "tfdist.")


@contextlib.contextmanager
def of_each_replica(owners: Iterable[Any]) -> Iterator[None]:
    """While the block runs on a replica, it finds its own attributes of these objects after each meeting."""
    context = tf.distribute.get_replica_context()
    owners = [vars(one) for one in owners if not type(one).__module__.startswith(_OTHERS)]
    if not owners or len(context.strategy.extended.worker_devices) == 1:
        yield
        return
    merge_call = context.merge_call

    def meet(*args: Any, **kwargs: Any) -> Any:
        before = [dict(attributes) for attributes in owners]
        changeable = [one for values in before for one in values.values() if isinstance(one, (list, dict))]
        contents = [(one, dict(one) if isinstance(one, dict) else list(one)) for one in changeable]
        result = merge_call(*args, **kwargs)
        for attributes, values in zip(owners, before, strict=True):
            for name, value in values.items():
                other = attributes.get(name)
                if other is not value and _is_of_replica(value, other):
                    attributes[name] = value  # past Keras' attribute tracking
        for one, items in contents:
            _put_back(one, items)
        return result

    with shadowed(context, merge_call=meet):
        yield


def _is_of_replica(value: Any, other: Any) -> bool:
    """Whether two values of an attribute may be those of two replicas."""
    if isinstance(value, _CONTAINERS) and isinstance(other, _CONTAINERS):
        return True
    return any(map(_is_kept, (*_items(value), *_items(other))))


def _items(value: Any) -> list[Any]:
    if not isinstance(value, _CONTAINERS):
        return [value]
    return list(value.values() if isinstance(value, dict) else value)


def _is_kept(value: Any) -> bool:
    return isinstance(value, _KINDS) and not isinstance(value, bool)


def _put_back(container: list | dict, items: list | dict) -> None:
    """Lets a list or a dict contain what it did, if tensors or numbers have come or gone."""
    now, then = _items(container), _items(items)
    is_same = len(now) == len(then) and all(one is other for one, other in zip(now, then, strict=True))
    if is_same or not any(map(_is_kept, (*now, *then))):
        return
    # Methods of these classes, not Keras' subclasses, which would track what is put in.
    kind = next(one for one in (collections.OrderedDict, dict, list) if isinstance(container, one))
    kind.clear(container)
    (list.extend if kind is list else kind.update)(container, items)
