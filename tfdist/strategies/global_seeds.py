"""The seed generator of `keras.random` functions that are given none, under a strategy.

Keras makes it where it is first asked for, and keeps it by thread. Under a strategy that is within a step, where no
variable can be made, and on a thread of a replica, which does not know the one of the program.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.utils.rng_utils import get_random_seed
from tensorflow.python.distribute.values import DistributedVariable

from tfdist.compat.scopes import outside_of_scope


def current() -> keras.random.SeedGenerator | None:
    """This thread's generator, if there is one."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def share(generator: keras.random.SeedGenerator | None) -> None:
    """Makes a generator this thread's."""
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def shared_with(function: Callable) -> Callable:
    """The function, for the thread of a replica."""
    generator = current()

    @functools.wraps(function)
    @tf.autograph.experimental.do_not_convert
    def with_seeds(*args: Any) -> Any:
        share(generator)
        return function(*args)

    return with_seeds


def make(strategy: Any) -> None:
    """Makes the generator of a strategy this thread's; it goes on where another one was.

    A strategy has one, made with the first model that it builds: in the scope of several processes a new variable is a
    broadcast, and what decides here (a seed set on the chief alone, a session cleared) need not be the same on all.
    """
    before, own = current(), getattr(strategy, "_global_seeds", None)
    if own is None:
        own = strategy._global_seeds = _new(strategy)
        own.is_used = False
    elif before is None and get_random_seed() is not None:
        # Seeded anew since: what Keras would make now.
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
    # Most models never ask for it, and Python's random numbers must not depend on whether there is one.
    state = random.getstate()
    with strategy.scope():
        generator = keras.random.SeedGenerator()
    random.setstate(state)
    return generator


def is_used(generator: keras.random.SeedGenerator) -> bool:
    """Whether anybody has drawn from it: only then does it belong to the state of a training."""
    return getattr(generator, "is_used", True)


def is_here(generator: keras.random.SeedGenerator) -> bool:
    """Whether its state is of the strategy in whose scope, or step, this is called."""
    return _strategy_of(generator) in (None, tf.distribute.get_strategy())


def _strategy_of(generator: keras.random.SeedGenerator) -> Any:
    value = generator.state.value
    return value.distribute_strategy if isinstance(value, DistributedVariable) else None
