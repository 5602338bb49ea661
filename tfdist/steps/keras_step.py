"""Recognises the step functions that Keras hands to `Strategy.run`, and holds what is known while one is traced.

Keras' trainer calls `strategy.run(model.train_step, ...)`. That bound method is where a strategy meets the model it
trains, so everything that needs the model (its optimizers, its seeds, its normalisation layers) starts here.
`begin_replica` computes the weight of a replica: its share of the rows of the batch. Functions of custom training
loops are not recognised and keep `tf.distribute`'s documented semantics.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.patch import owner
from tfdist.compat.upstream import ControlFlowFuncGraph, DistributedValues, global_state

# Not `keras.Model`: some models are layers that mix Keras' trainer in.
_Trainer = owner(keras.Model, "compile")


@dataclasses.dataclass
class ReplicaStep:
    """A step on one replica of this process.

    Attributes:
        rows: how many of its rows count.
        relative_weight: these over the mean of all replicas.
        may_be_empty: whether it may have none.
        state: what it has written of its layers' state: a `ReplicaState`.
        values: of a shard, and of `predict`, how values depend on its rows: `LocalValues`.
        scaled: by the id of an optimizer, what is known of the losses that it has scaled.
        scattered: by id, parts of gradients that were computed.
        of_slices: ids of those of weights of which some rows were used, perhaps several times.
        branches: names of the graphs of branches in which an optimizer has applied some.
        in_parts: the weights that an optimizer works on, of which it sees this replica's parts if they are sharded.
        meetings: the layers in which it has exchanged something; `None` outside of layers.
        applied: how often an optimizer has applied gradients.
        listing: the gradients that it has for the last of them, then those that all have (common_gradients.py).
        agreed: in a branch of the step, whether all replicas take the same one; else `None`.
        is_updating: whether an optimizer updates weights, which all replicas do alike.
        reads_results: whether it has asked a metric for its result.
        branch: predicate and functions of a `tf.cond` in which all meet, and what Keras keeps in the replica's thread.
    """

    rows: Any = None
    relative_weight: Any = None
    may_be_empty: bool = False
    state: Any = None
    values: Any = None
    scaled: dict[int, Any] = dataclasses.field(default_factory=dict)
    scattered: dict[int, Any] = dataclasses.field(default_factory=dict)
    of_slices: set[int] = dataclasses.field(default_factory=set)
    branches: set[str] = dataclasses.field(default_factory=set)
    in_parts: Sequence[Any] = ()
    meetings: list[keras.Layer | None] = dataclasses.field(default_factory=list)
    applied: int = 0
    listing: Any = None
    agreed: bool | None = None
    is_updating: bool = False
    reads_results: bool = False
    branch: tuple[Any, tuple, dict[str, Any]] | None = None


@dataclasses.dataclass
class KerasStep:
    """One `train_step`, `test_step` or predict step of a Keras model, while it is traced or run.

    A replica's `weight` is its share of the rows of the global batch: the mean of a loss over the global batch is the
    sum over the replicas of weight times local mean. With equal shares it is one over the number of replicas; a
    replica that got no row of an uneven last batch has weight 0. `relative_weight` is weight times number of replicas.

    Attributes:
        kind: "train", "test" or "predict".
        model: the model.
        function: what Keras wants to be run on every replica.
        on_batch: whether the data came from `*_on_batch`, not from a distributed dataset.
        same_outputs: which outputs of a predict step, flattened, are the same on all replicas.
        constant_outputs: which of them are so without an exchange; a static number of rows looks like one.
        sizeless_outputs: which of them may have any number of rows, that of no replica included.
        is_compiled: whether XLA compiles what the replicas compute between their exchanges.
        exchanged: what came of the last exchange, on all replicas of this process.
        purpose: a number, the same on all processes, and a text that tell the step from those of other models.
        graph: where the replicas' steps are traced; `None` if they are run, or cannot exchange anything.
        batch: shapes and dtypes of a replica's rows, as specifications of types.
        is_of_all: whether all processes have the same global batch.
        scalars: what a `Mean` or `Sum` was given for a batch: (metric, number, whether it is averaged over the
            replicas).
        given: by id, a compiled loss or a metric, and the specification of its arguments: `(args, kwargs)`.
        optimizers: ids of those whose gradients are those of the global batch, and of their parts.
        shard: the number of the part of a batch that the step is for, where one replica computes several; else `None`.
        parts: the step on each replica of this process, by its local index.
        begun: puts back what the model's objects had in their attributes when the first replica began.
    """

    kind: str
    model: keras.Model
    function: Callable
    on_batch: bool = False
    same_outputs: set[int] = dataclasses.field(default_factory=set)
    constant_outputs: set[int] = dataclasses.field(default_factory=set)
    sizeless_outputs: set[int] = dataclasses.field(default_factory=set)
    is_compiled: bool = False
    exchanged: list[tf.Tensor] = dataclasses.field(default_factory=list)
    purpose: tuple[int, str] = (0, "")
    batch: Any = None
    is_of_all: bool = False
    scalars: list[tuple[keras.Metric, Any, bool]] = dataclasses.field(default_factory=list)
    given: dict[int, tuple[keras.Loss | keras.Metric, tuple]] = dataclasses.field(default_factory=dict)
    graph: tf.Graph | None = None
    optimizers: set[int] = dataclasses.field(default_factory=set)
    shard: tf.Tensor | None = None
    parts: dict[int, ReplicaStep] = dataclasses.field(default_factory=lambda: collections.defaultdict(ReplicaStep))
    begun: Callable[..., None] | None = None

    def begin_replica(self, fixed: int | None, rows: tf.Tensor, global_rows: tf.Tensor | None) -> None:
        """Notes this replica's number of rows and weight. Called on every replica before the step function.

        Args:
            fixed: number of rows of this replica's share of the batch, where that is known while tracing.
            rows: how many of them count.
            global_rows: rows of the global batch; `None` if the dataset does not know.
        """
        context = tf.distribute.get_replica_context()
        if global_rows is None:
            global_rows = context.all_reduce(tf.distribute.ReduceOp.SUM, rows)
        here = self.here
        here.rows, here.may_be_empty = rows, fixed is None or fixed <= 1
        # In this order it is 1 where all have equally many rows, without any rounding.
        here.relative_weight = rows * context.num_replicas_in_sync / tf.maximum(global_rows, 1)

    @property
    def here(self) -> ReplicaStep:
        """The step on the current replica."""
        return self.parts[local_replica()]

    def note_batch(self, data: Any) -> None:
        """Notes shapes and dtypes of this replica's rows."""
        self.batch = tf.nest.map_structure(specification, data)

    def begin_shard(self, weight: tf.Tensor) -> None:
        """Notes this replica's weight, where the one who has cut the batch knows it.

        Args:
            weight: a float64 scalar.
        """
        self.here.relative_weight = weight * self.replicas

    @property
    def weight(self) -> tf.Tensor:
        """Share of the current replica in the global batch, a float64 scalar in [0, 1]."""
        return self.relative_weight / self.replicas

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return tf.distribute.get_replica_context().num_replicas_in_sync

    @property
    def relative_weight(self) -> tf.Tensor:
        """Rows of the current replica over the mean of all replicas, a float64 scalar."""
        return self.here.relative_weight

    def can_meet(self) -> bool:
        """Whether the replicas can exchange values here: not in a branch or a loop of the step."""
        return tf.executing_eagerly() or self.graph is tf.compat.v1.get_default_graph()

    def as_mean(self, loss: Any) -> tf.Tensor:
        """A loss whose gradients, weighted by rows, add up: that of a vector is that of its sum."""
        loss = tf.convert_to_tensor(loss)
        return tf.math.divide_no_nan(loss, tf.cast(self.weight, loss.dtype)) if loss.shape.rank else loss

    def adds_up(self, value: tf.Tensor) -> bool:
        """Whether the replicas' values of a traced step add up to that of the global batch."""
        return self._known is not None and self._known.adds_up(value)

    def dependence_of(self, value: tf.Tensor) -> Any:
        """How a value of a traced step depends on the replica's rows: a `Dependence`."""
        return self._known.dependence_of(value)

    @property
    def _known(self) -> Any:
        return self.here.values if self.here.state is None else self.here.state

    @property
    def has_rows(self) -> tf.Tensor | None:
        """Whether the current replica has rows of its own, a boolean scalar; `None` if it certainly has."""
        return self.here.rows > 0 if self.here.may_be_empty else None


def specification(leaf: Any) -> tf.TypeSpec | None:
    """Shape and dtype of a tensor; `None` for `None`."""
    return None if leaf is None else tf.type_spec_from_value(leaf)


def recognise_step(function: Callable, args: tuple = (None,), kwargs: dict | None = None) -> KerasStep | None:
    """The Keras step that `Strategy.run` is given, or `None` if it is something else (a user's own function)."""
    if len(args) != 1 or kwargs:
        return None
    if isinstance(function, types.MethodType) and isinstance(function.__self__, _Trainer):
        kind = {"train_step": "train", "test_step": "test"}.get(function.__name__)
        return KerasStep(kind, function.__self__, function) if kind else None
    if "make_predict_function.<locals>.one_step_on_data" in getattr(function, "__qualname__", ""):
        return KerasStep("predict", _predicting_model(function), function)
    return None


def _predicting_model(function: Callable) -> keras.Model:
    variables = inspect.getclosurevars(inspect.unwrap(function)).nonlocals
    return variables["self"] if "self" in variables else _predicting_model(variables["step_func"])


def current_step() -> KerasStep | None:
    """The Keras step that is traced (or eagerly run) in this replica, or `None` outside of one."""
    return None if tf.distribute.in_cross_replica_context() else step_of(tf.distribute.get_strategy())


def step_of(strategy: Any) -> KerasStep | None:
    """The Keras step that a strategy's replicas trace, or `None`. They are threads: each finds it at the strategy."""
    return getattr(strategy, "_keras_step", None)


def traced(strategy: Any, step: KerasStep) -> contextlib.AbstractContextManager[None]:
    """While the block runs, a strategy's replicas trace this step."""
    return shadowed(strategy, _keras_step=step)


def xla_compiles(model: keras.Model, batch: Any = None) -> bool:
    """Whether a step is traced of a model compiled with `jit_compile`, and XLA can compile it for this batch.

    Not a ragged one: XLA compiles a cluster for each number of values, and takes that of another number.
    """
    of_replicas = [leaf.values if isinstance(leaf, DistributedValues) else [leaf] for leaf in tf.nest.flatten(batch)]
    is_ragged = any(isinstance(leaf, tf.RaggedTensor) for leaves in of_replicas for leaf in leaves)
    return bool(model.jit_compile) and not is_ragged and not tf.executing_eagerly()


def marked_for_xla(is_compiled: bool) -> Any:
    """A context in which traced operations are marked for XLA, if it is to compile them.

    TensorFlow clusters those that XLA knows (https://www.tensorflow.org/xla#auto-clustering): collectives, and what XLA
    has no kernel for, stay outside.
    """
    return tf.xla.experimental.jit_scope() if is_compiled else contextlib.nullcontext()


class Exchanges(Exception):
    """In a branch that replicas may not all take, they would exchange something."""


def check_that_all_are_here() -> None:
    """Called before replicas exchange something.

    Raises:
        Exchanges: in a branch that not all of them may take.
        NotImplementedError: in a loop.
    """
    step = current_step()
    if step is not None:
        step.here.meetings.append(_current_layer())
    state = None if step is None else step.here.state
    if state is None or state.graph is None:
        return
    agreed, graph = step.here.agreed, tf.compat.v1.get_default_graph()
    if agreed is False:
        raise Exchanges
    if agreed is None and graph is not state.graph and isinstance(graph, ControlFlowFuncGraph):
        raise NotImplementedError(
            f"Received: a loop (tf.while_loop, tf.map_fn, ...) in the step of model '{step.model.name}', in which "
            "replicas exchange gradients or statistics: one that ends sooner would leave the others waiting. Expected: "
            "a loop of Python, `for _ in range(n)`, which makes n steps of it; or optimizer.apply after the loop."
        )


def _current_layer() -> keras.Layer | None:
    """The innermost layer that is called in this thread."""
    callers = [scope.caller for scope in global_state.get_global_attribute("name_scope_stack") or ()]
    return next((caller for caller in reversed(callers) if isinstance(caller, keras.Layer)), None)


def local_replica() -> int:
    """Index of the current replica among those of this process."""
    return tf.distribute.get_replica_context()._replica_id


def global_replica() -> int:
    """Index of the current replica among those of all workers."""
    return int(tf.get_static_value(tf.distribute.get_replica_context().replica_id_in_sync_group))


@contextlib.contextmanager
def shadowed(owner: Any, **attributes: Any) -> Iterator[None]:
    """Shadows attributes of one instance (never of its class) until the block ends. Another shadow comes back then."""
    before = {name: vars(owner)[name] for name in attributes if name in vars(owner)}
    for name, value in attributes.items():
        # Past Keras' attribute tracking, which would record functions as state of the object.
        object.__setattr__(owner, name, value)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                object.__setattr__(owner, name, before[name])
            else:
                object.__delattr__(owner, name)
