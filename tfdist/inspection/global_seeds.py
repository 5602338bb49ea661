"""Keras' global seed generator, which `keras.random` functions use when they are called without a seed.

Keras creates it at its first use, and stores it by thread. Under a strategy the first use is inside of a step, where no
variable can be created, and on the thread of a replica, which does not see the generator of the main thread. So tfdist
creates it before the step (`make`), and passes it on to the threads of the replicas (`shared_with`).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.scopes import outside_of_scope
from tfdist.compat.upstream import DistributedVariable, get_random_seed, global_state

# The name under which Keras stores it. Only since Keras 3.13 there is a constant for it.
_NAME = "global_seed_generator"


def current() -> keras.random.SeedGenerator | None:
    """This thread's generator, if there is one."""
    return global_state.get_global_attribute(_NAME)


def share(generator: keras.random.SeedGenerator | None) -> None:
    """Sets the generator of this thread."""
    global_state.set_global_attribute(_NAME, generator)


def shared_with(function: Callable) -> Callable:
    """Wraps a function so that it uses this thread's generator on the thread of a replica, too."""
    generator = current()

    @functools.wraps(function)
    @tf.autograph.experimental.do_not_convert
    def with_seeds(*args: Any) -> Any:
        share(generator)
        return function(*args)

    return with_seeds


def make(strategy: Any) -> None:
    """Sets the strategy's generator as that of this thread, with the state of the generator that was set before.

    A strategy has one generator, created with the first model that it builds, and never creates another. Creating a
    variable under several processes is a broadcast, in which all have to take part, and they need not agree on whether
    a new one is needed: a seed may be set, or a session cleared, on the chief alone.
    """
    before, own = current(), getattr(strategy, "_global_seeds", None)
    if own is None:
        own = strategy._global_seeds = _new(strategy)
        own.is_used = False
    elif before is None and get_random_seed() is not None:
        # `keras.utils.set_random_seed` has removed the generator: start from the one that Keras would create now.
        with outside_of_scope():
            before = _new(tf.distribute.get_strategy())
            before.is_used = False
    if before is not None and before is not own:
        with outside_of_scope():
            state = before.state.numpy()
        own.state.assign(state)
        own.is_used = own.is_used or is_used(before)
    share(own)


def _new(strategy: tf.distribute.Strategy) -> keras.random.SeedGenerator:
    # A SeedGenerator draws its seed from Python's generator. Most models never use it: put the state back, so that
    # Python's random numbers do not depend on whether it was created.
    state = random.getstate()
    with strategy.scope():
        generator = keras.random.SeedGenerator()
    random.setstate(state)
    return generator


def is_used(generator: keras.random.SeedGenerator) -> bool:
    """Whether numbers were drawn from it. Only then is it part of the state of a training."""
    return getattr(generator, "is_used", True)


def is_here(generator: keras.random.SeedGenerator) -> bool:
    """Whether its state is a variable of the current strategy, or of none."""
    return _strategy_of(generator) in (None, tf.distribute.get_strategy())


def _strategy_of(generator: keras.random.SeedGenerator) -> Any:
    value = generator.state.value
    return value.distribute_strategy if isinstance(value, DistributedVariable) else None
