"""Parts of a model that Keras does not list: optimizers, metrics and seeds among the attributes of its layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import keras

from tfdist.inspection import global_seeds


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, and those that a custom `train_step` uses, such as the two of a GAN.

    They are looked for among the attributes of all layers, in lists and dicts, too, but not inside of other
    optimizers.
    """
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for item in items_of(vars(layer)):
            if isinstance(item, keras.optimizers.Optimizer):
                found[id(item)] = item
    parts = {id(part) for optimizer in found.values() for part in parts_of(optimizer)}
    return [optimizer for key, optimizer in found.items() if key not in parts]


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """`model.metrics`, and those among the attributes of all layers (in lists and dicts, too), with their parts."""
    found: dict[int, keras.Metric] = {}

    def add(items: Iterable[Any]) -> None:
        for item in items:
            if isinstance(item, keras.Metric) and id(item) not in found:
                found[id(item)] = item
                add(items_of(vars(item)))

    add(model.metrics)
    for layer in model._flatten_layers():
        add(items_of(vars(layer)))
    return list(found.values())


def items_of(value: Any) -> Iterator[Any]:
    """Yields the items of lists, tuples and dicts, at any depth."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if not isinstance(item, (list, tuple, dict)):
            yield item
        elif id(item) not in seen:
            # A dict may contain itself.
            seen.add(id(item))
            waiting += reversed(list(item.values() if isinstance(item, dict) else item))


def parts_of(optimizer: Any) -> list[keras.optimizers.Optimizer]:
    """The optimizers inside of a `LossScaleOptimizer`, a `MultiOptimizer` and the like, at any depth."""
    inner = getattr(optimizer, "inner_optimizer", None)
    parts = [inner] if inner is not None else list(getattr(optimizer, "optimizers", []))
    return parts + [deeper for part in parts for deeper in parts_of(part)]


def seed_generators_of(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Seed generators of all layers, and the global one that `keras.random` functions use without a seed."""
    found: dict[int, Any] = {}
    for layer in model._flatten_layers():
        for generator in getattr(layer, "_seed_generators", []):
            found[id(generator)] = generator
    generator = global_seeds.current()
    if generator is not None:
        found[id(generator)] = generator
    return list(found.values())
