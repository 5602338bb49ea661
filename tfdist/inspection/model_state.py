"""What a training has as state and Keras does not list: parts of a model, values on each replica, random numbers.

Optimizers, metrics and seeds may stand among the attributes of layers. Variables such as metrics within an epoch have a
value of their own on each replica. Data is shuffled with the global generators of Python, NumPy and TensorFlow.

`keras.random` functions that are called without a seed draw from Keras' global generator. Keras creates it at its first
use, and stores it by thread. Under a strategy the first use is inside of a step, where no variable can be created, and
on the thread of a replica, which does not see the generator of the main thread. So tfdist creates it before the step
(`make_global_seeds`), and the replicas' threads take it over (`with_state_of_caller` in compat/keras.py).
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.scopes import outside_of_scope
from tfdist.compat.upstream import DistributedVariable, SyncOnReadVariable, context, get_random_seed, global_state


def own_methods(model: keras.Model, *names: str) -> list[str]:
    """Those of these methods that are not `keras.Model`'s."""
    return [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, and those that a custom `train_step` uses, such as the two of a GAN.

    They are looked for among the attributes of all layers, in lists and dicts, too, but not inside of other
    optimizers.
    """
    items = (item for layer in model._flatten_layers() for item in items_of(vars(layer)))
    found = {id(item): item for item in items if isinstance(item, keras.optimizers.Optimizer)}
    parts = {id(part) for optimizer in found.values() for part in parts_of(optimizer)}
    return [optimizer for key, optimizer in found.items() if key not in parts]


def all_optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The optimizers of a model, and those inside of them."""
    return [part for optimizer in optimizers_of(model) for part in [optimizer, *parts_of(optimizer)]]


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


def held_variables(model: keras.Model) -> list[tf.Variable]:
    """`tf.Variable`s among the attributes of all layers, which Keras does not list."""
    items = (item for layer in model._flatten_layers() for item in items_of(vars(layer)))
    return list({id(item): item for item in items if isinstance(item, tf.Variable)}.values())


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
    """The optimizers in the attributes of a `LossScaleOptimizer`, a user's own wrapper and the like, at any depth."""
    found: dict[int, keras.optimizers.Optimizer] = {}
    waiting = [optimizer]
    while waiting:
        held = [one for one in items_of(vars(waiting.pop())) if isinstance(one, keras.optimizers.Optimizer)]
        new = {id(one): one for one in held if one is not optimizer and id(one) not in found}
        found |= new
        waiting += new.values()
    return list(found.values())


def seed_generators_of(model: keras.Model) -> list[keras.random.SeedGenerator]:
    """Seed generators of all layers, and the global one that `keras.random` functions use without a seed."""
    own = [each for layer in model._flatten_layers() for each in getattr(layer, "_seed_generators", [])]
    return list({id(each): each for each in (*own, global_seeds()) if each is not None}.values())


def parts_of_variable(variable: Any) -> list[tf.Variable]:
    """The TensorFlow variables behind a Keras (or TensorFlow) variable: one for each local replica."""
    value = getattr(variable, "_value", variable)
    return list(value.values) if isinstance(value, DistributedVariable) else [value]


def own_copy(variable: Any) -> tf.Variable:
    """The TensorFlow variable behind a Keras (or TensorFlow) variable, on the first local replica."""
    return parts_of_variable(variable)[0]


def is_kept_per_replica(variable: Any) -> bool:
    """Whether each replica has a value of its own, which are combined only when the variable is read."""
    return isinstance(getattr(variable, "_value", variable), SyncOnReadVariable)


def is_sharded(variable: Any) -> bool:
    """Whether each replica keeps a part of a variable, as under FullyShardedStrategy."""
    # Its class is asked: variables of several replicas ask these for attributes that they do not have.
    return getattr(type(getattr(variable, "_value", variable)), "is_sharded", False)


def is_table(variable: Any) -> bool:
    """Whether each replica keeps rows of a variable, and looks up those of others."""
    return is_sharded(variable) and variable._value.is_table


def gather(strategy: tf.distribute.Strategy, variables: Sequence[Any]) -> list[tf.Tensor]:
    """The values of all replicas of all workers; with several workers, one collective for each dtype.

    The variables of one dtype are laid end to end in one row for each replica, so that they need one collective only.
    Floats, int32 and int64 are sent as they are, complex numbers and uint64 as their bits, all others as int32.

    Args:
        strategy: the strategy of the variables.
        variables: variables that are kept per replica; none of them may be of text.

    Returns:
        For each variable a tensor of shape `(replicas, *shape of the variable)`.
    """
    local = [tf.stack([part.read_value() for part in parts_of_variable(variable)]) for variable in variables]
    if strategy.num_replicas_in_sync == len(strategy.extended.worker_devices):
        return local
    gathered: list[tf.Tensor | None] = [None] * len(local)
    for dtype in dict.fromkeys(value.dtype for value in local):
        chosen = [i for i, value in enumerate(local) if value.dtype == dtype]
        as_bits = dtype.is_complex or dtype == tf.uint64
        sent = [tf.bitcast(local[i], tf.int64) if as_bits else local[i] for i in chosen]
        carried = sent[0].dtype if dtype.is_floating or sent[0].dtype in (tf.int32, tf.int64) else tf.int32
        rows = tf.concat([tf.cast(tf.reshape(one, [len(one), -1]), carried) for one in sent], axis=1)
        everything = _gather_of(strategy)(rows)
        parts = tf.split(everything, [one[0].shape.num_elements() for one in sent], axis=1)
        for i, one, part in zip(chosen, sent, parts, strict=True):
            whole = tf.reshape(part, [-1, *one.shape[1:]])
            gathered[i] = tf.bitcast(whole, dtype) if as_bits else tf.cast(whole, dtype)
    return gathered


@functools.cache
def _gather_of(strategy: tf.distribute.Strategy) -> Callable[[tf.Tensor], tf.Tensor]:
    """A function that stacks the rows of all replicas of all workers; it is traced once for each shape.

    Each worker passes the rows of its own replicas. In the graph, every replica takes its row, and an all-gather of the
    strategy stacks them in the order of the replicas.
    """

    @tf.function(reduce_retracing=False)
    def gather_rows(rows: tf.Tensor) -> tf.Tensor:
        first = strategy.extended._input_position()[1] * rows.shape[0]

        def row_of(context: Any) -> tf.Tensor:
            return rows[context.replica_id_in_sync_group - first][tf.newaxis]

        return strategy.gather(strategy.experimental_distribute_values_from_function(row_of), axis=0)

    return gather_rows


def scatter(strategy: tf.distribute.Strategy, variable: Any, values: np.ndarray) -> None:
    """Sets the value of every local replica.

    Args:
        strategy: the strategy of the variable.
        variable: a Keras variable that is kept per replica.
        values: what `gather` returned for it. If the number of replicas was another one, the values are combined: of a
            sum the first replica gets all and the others 0; a mean is set on every replica.
    """
    parts = parts_of_variable(variable)
    workers, worker = strategy.extended._input_position()
    replicas = workers * len(parts)
    if len(values) != replicas:
        whole = combine(variable, values)
        rest = np.zeros_like(whole) if _is_combined_as(variable, "sum") else whole
        values = np.stack([whole] + [rest] * (replicas - 1))
    for k, part in enumerate(parts):
        part.assign(tf.constant(values[worker * len(parts) + k], dtype=part.dtype))


def combine(variable: Any, values: np.ndarray) -> np.ndarray:
    """The value of the whole variable, from the values of all replicas: combined as `variable.aggregation` says."""
    if _is_combined_as(variable, "sum"):
        return values.sum(0, dtype=values.dtype)
    return values.mean(0, dtype=values.dtype) if _is_combined_as(variable, "mean") else values[0]


def _is_combined_as(variable: Any, name: str) -> bool:
    """Whether a Keras (or TensorFlow) variable has this aggregation."""
    return variable.aggregation in (name, tf.VariableAggregation[name.upper()])


def random_state() -> list:
    """The states of TensorFlow's global seed and operation seeds, and of Python's and NumPy's global generators."""
    name, keys, *rest = np.random.get_state()
    # TensorFlow has no generator of operation seeds until a global seed is set.
    operations = getattr(context.context(), "_rng", None)
    return [
        context.global_seed(),
        operations and _internal(operations),
        _internal(random),
        [name, keys.tolist(), *rest],
    ]


def restore_random_state(state: list) -> None:
    """Puts this process into a state that `random_state` returned (in another one)."""
    seed, operations, python, (name, keys, *rest) = state
    tf.random.set_seed(seed)
    if operations is not None:
        _into(context.context()._rng, operations)
    _into(random, python)
    np.random.set_state((name, np.asarray(keys, "uint32"), *rest))


def is_random_state(state: Any) -> bool:
    """Whether this is what `random_state` returns, so that `restore_random_state` will take it.

    Example:
        >>> is_random_state(random_state()), is_random_state([1, None, [3, [1], None], ["MT19937", [], 0, 0, 0.0]])
        (True, False)
    """
    try:
        seed, operations, python, (name, keys, *rest) = state
        for internal in filter(None, (operations, python)):
            _into(random.Random(), internal)
        np.random.RandomState().set_state((name, np.asarray(keys, "uint32"), *rest))
    except (TypeError, ValueError, LookupError, ArithmeticError):
        return False
    return python is not None and (seed is None or (type(seed) is int and -(2**63) <= seed < 2**63))


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Afterwards, Python's and NumPy's global generators have the state that they had before this context.

    Example:
        >>> random.seed(1)
        >>> with random_state_kept():
        ...     drawn = random.random()
        >>> drawn == random.random()
        True
    """
    python, numbers = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)


def _internal(generator: random.Random) -> list:
    version, internal, gauss = generator.getstate()
    return [version, list(internal), gauss]


def _into(generator: random.Random, state: list) -> None:
    version, internal, gauss = state
    generator.setstate((version, tuple(internal), gauss))


# The name under which Keras stores it. Only since Keras 3.13 there is a constant for it.
_NAME = "global_seed_generator"


def global_seeds() -> keras.random.SeedGenerator | None:
    """This thread's generator, if there is one."""
    return global_state.get_global_attribute(_NAME)


def share_global_seeds(generator: keras.random.SeedGenerator | None) -> None:
    """Sets the generator of this thread."""
    global_state.set_global_attribute(_NAME, generator)


def make_global_seeds(strategy: Any) -> None:
    """Sets the strategy's generator as that of this thread, with the state of the generator that was set before.

    A strategy has one generator, created with the first model that it builds, and never creates another. Creating a
    variable under several processes is a broadcast, in which all have to take part, and they need not agree on whether
    a new one is needed: a seed may be set, or a session cleared, on the chief alone.
    """
    before, own = global_seeds(), strategy._global_seeds
    if own is None:
        own = strategy._global_seeds = _new_seed_generator(strategy)
        own.is_used = False
    elif before is None and get_random_seed() is not None:
        # `keras.utils.set_random_seed` has removed the generator: start from the one that Keras would create now.
        with outside_of_scope():
            before = _new_seed_generator(tf.distribute.get_strategy())
            before.is_used = False
    if before is not None and before is not own:
        with outside_of_scope():
            state = before.state.numpy()
        own.state.assign(state)
        own.is_used = own.is_used or is_used(before)
    share_global_seeds(own)


def _new_seed_generator(strategy: tf.distribute.Strategy) -> keras.random.SeedGenerator:
    # A SeedGenerator draws its seed from Python's generator. Most models never use it: put the state back, so that
    # Python's random numbers do not depend on whether it was created.
    with random_state_kept(), strategy.scope():
        return keras.random.SeedGenerator()


def is_used(generator: keras.random.SeedGenerator) -> bool:
    """Whether numbers were drawn from it. Only then is it part of the state of a training."""
    return getattr(generator, "is_used", True)


def is_here(generator: keras.random.SeedGenerator) -> bool:
    """Whether its state is a variable of the current strategy, or of none."""
    value = generator.state.value
    return not isinstance(value, DistributedVariable) or value.distribute_strategy is tf.distribute.get_strategy()
