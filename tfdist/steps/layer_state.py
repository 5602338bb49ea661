"""State of layers, other than weights and metrics, that a step updates on each replica from that replica's own rows.

Moving statistics, codebooks, centres, queues: without exchange the replicas' copies drift apart. A variable's
`aggregation` says how they are brought together; where it says nothing they are averaged by rows. What the replicas
compute alike, such as the weights of a momentum encoder, is never sent anywhere.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import DistributedVariable, in_stateless_scope
from tfdist.inspection.model_parts import items_of, optimizers_of, seed_generators_of
from tfdist.inspection.replica_values import is_kept_per_replica, parts_of_variable
from tfdist.steps import collectives
from tfdist.steps.collectives import from_wire, to_wire
from tfdist.steps.gradients import all_reduce_sum
from tfdist.steps.keras_step import KerasStep, global_replica, local_replica, shadowed
from tfdist.steps.local_values import Local, LocalValues, only_updates

_WARNED = "_tfdist_warned"
_NO_MEAN = (
    "which equals one process only for updates that are linear in means over the rows: not for queues of rows, counts "
    "or maxima"
)
_READ_AFTER = "but in the same step each replica has read its own"


class ReplicaState:
    """What one replica's step has written so far.

    Args:
        step: the step that is traced, or run eagerly.
        data: this replica's rows of the batch.

    Attributes:
        graph: where it is traced, or `None`.
    """

    def __init__(self, step: KerasStep, data: Any) -> None:
        self._step = step
        self._pending: list[Any] = []
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        self._watched = watched = _state_of(step.model)
        if self.graph is None:
            return
        optimizers = [v for optimizer in optimizers_of(step.model) for v in optimizer.variables if _is_mirrored(v)]
        self._by_handle = {id(_part(v).handle): v for v in watched}
        self._values = LocalValues(
            self.graph,
            tf.nest.flatten(data, expand_composites=True),
            same=[_part(v) for v in (*watched, *optimizers)],
            watched=[_part(v) for v in watched],
            others=_devices_of_others(),
        )

    def take_averaged(self) -> list[Any]:
        """Returns the variables that have to be averaged now, and removes them from those that were written."""
        self._look()
        due = [v for v in self._pending if _is_averaged(v)]
        self._pending = [v for v in self._pending if not _is_averaged(v)]
        return due

    def skip(self) -> None:
        """Takes what was written since the last look for global: an optimizer has written it."""
        if self.graph is not None:
            self._values.skip()

    def bring_together(self) -> None:
        """At the end of the step, makes local values that it has written the same on all replicas."""
        if self.graph is None:
            # Only Keras' own variables tell that they are assigned.
            self._pending += [v for v in self._watched if not isinstance(v, keras.Variable)]
        averaged = self.take_averaged()
        if averaged:
            assign(averaged, all_reduce_sum(values_of(averaged), weight=self._step.weight))
        firsts, self._pending = self._pending, []
        assign(firsts, [_of_first_replica(value) for value in values_of(firsts)])

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Assigns a variable in the step; what its `aggregation` says is done at once."""
        part, rule = _part(variable), _rule(variable)
        value = tf.cast(tf.convert_to_tensor(value), part.dtype)
        if not self._can_meet() or rule == "none":
            part.assign(value)
            if self.graph is None and _is_among(variable, self._watched) and not _is_among(variable, self._pending):
                self._pending.append(variable)
            return
        if rule == "sum":
            value = _sum(self._step, value)
        elif self._is_local(variable, value):
            if _is_averaged(variable):
                (value,) = all_reduce_sum([value], weight=self._step.weight)
            else:
                value = _of_first_replica(value)
        part.assign(value)

    def add(self, variable: keras.Variable, value: Any) -> None:
        """Adds to a variable with `aggregation="sum"` what all replicas add."""
        part = _part(variable)
        value = tf.cast(tf.convert_to_tensor(value), part.dtype)
        part.assign_add(_sum(self._step, value) if self._can_meet() else value)

    def adds_up(self, value: tf.Tensor) -> bool:
        """Whether the replicas' values add up to that of the global batch, as sums over rows and numbers of rows do."""
        if self.graph is not tf.compat.v1.get_default_graph():
            return False
        self._look()
        return self._values.of(value) in (Local.SUM, Local.COUNT)

    def _can_meet(self) -> bool:
        """Replicas cannot exchange values in a branch or a loop of the step's graph."""
        return self.graph is None or self.graph is tf.compat.v1.get_default_graph()

    def _is_local(self, variable: keras.Variable, value: tf.Tensor) -> bool:
        if self.graph is None:
            return True
        self._look()
        local = self._values.of(value)
        if variable.trainable and local not in (None, Local.MEAN):
            self._warn(variable, _NO_MEAN)
        return local is not None

    def _look(self) -> None:
        """Finds the local values that were written since the last time."""
        if self.graph is None:
            self._agree_on_pending()
            return
        for access in self._values.accesses():
            variable = self._by_handle[access.handle]
            if access.is_write:
                self._note_write(variable, access.local)
            elif access.local and not only_updates(access.operation.outputs[0]):
                self._warn(variable, _READ_AFTER)

    def _agree_on_pending(self) -> None:
        """Run eagerly, a step may assign a variable on some replicas only; all have to exchange the same ones."""
        if self._watched:
            assigned = tf.constant([float(_is_among(v, self._pending)) for v in self._watched])
            anywhere = collectives.all_reduce(assigned, differentiable=False).numpy()
            self._pending = [v for v, count in zip(self._watched, anywhere, strict=True) if count]

    def _note_write(self, variable: Any, local: Local | None) -> None:
        self._pending = [other for other in self._pending if other is not variable]
        if local is None:
            return
        if _rule(variable) == "sum":
            raise NotImplementedError(
                f"Received: variable '{_path(variable)}' with aggregation='sum', assigned in a branch, a loop "
                "or a function (tf.cond, tf.while_loop, tf.map_fn, tf.function), where replicas cannot meet. Expected: "
                "assigned outside of it."
            )
        self._pending.append(variable)
        if local is not Local.MEAN and (_rule(variable) == "none" or variable.trainable):
            self._warn(variable, _NO_MEAN)

    def _warn(self, variable: Any, why: str) -> None:
        if local_replica() or hasattr(variable, _WARNED) or _is_of_keras(self._step.model, variable):
            return
        object.__setattr__(variable, _WARNED, True)
        kept = "replicas' average is" if _is_averaged(variable) else "first replica's value is"
        warnings.warn(
            f"Received: variable '{_path(variable)}', which each replica updates from its own rows of the batch. The "
            f"{kept} kept at the end of the step, {why}. Expected: "
            "add_weight(..., aggregation=) with 'mean', 'sum' or 'only_first_replica', where one of them is right as "
            "soon as it is assigned; or an update from the rows of all replicas, by "
            "tf.distribute.get_replica_context().all_gather(rows, axis=0). That context is None while a model is "
            "built.",
            stacklevel=2,
        )


@contextlib.contextmanager
def aggregated(step: KerasStep) -> Iterator[None]:
    """While a step is traced: assigning a variable of the model tells the replica's state."""
    with contextlib.ExitStack() as stack:
        for variable in step.model.variables:
            if _is_mirrored(variable):
                stack.enter_context(shadowed(variable, **_methods(step, variable)))
        yield


def _methods(step: KerasStep, variable: keras.Variable) -> dict[str, Callable]:
    def through(name: str, own: Callable[[ReplicaState, Any], None]) -> Callable:
        def assign(value: Any) -> Any:
            state = None if tf.distribute.in_cross_replica_context() else step.states.get(local_replica())
            if state is None:
                return getattr(type(variable), name)(variable, value)
            if in_stateless_scope():
                _refuse_sum(variable)
                return getattr(type(variable), name)(variable, value)
            own(state, value)
            return variable.value

        return assign

    methods = {"_direct_assign": through("_direct_assign", lambda state, value: state.assign(variable, value))}
    if variable.aggregation == "sum":
        methods["assign_add"] = through("assign_add", lambda state, value: state.add(variable, value))
        methods["assign_sub"] = through(
            "assign_sub", lambda state, value: state.add(variable, -tf.convert_to_tensor(value))
        )
    return methods


def _refuse_sum(variable: keras.Variable) -> None:
    """Refuses `aggregation='sum'` in a pure function, whose result is assigned later: it contains the old value."""
    if variable.aggregation == "sum":
        raise NotImplementedError(
            f"Received: variable '{variable.path}' with aggregation='sum', to which a layer adds that a memory policy "
            "covers. Expected: a policy with mode 'none' for the layer's block, or memory=None."
        )


def assign(variables: Iterable[Any], values: Iterable[tf.Tensor]) -> None:
    """Assigns to each replica's parts of variables values that are the same on all replicas."""
    for variable, value in zip(variables, values, strict=True):
        _part(variable).assign(value)


def values_of(variables: Iterable[Any]) -> list[tf.Tensor]:
    """The values of this replica's parts of variables."""
    return [tf.convert_to_tensor(_part(v)) for v in variables]


def _state_of(model: keras.Model) -> list[Any]:
    """The state that a step may write: the model's variables without seeds, and `tf.Variable`s that layers hold."""
    seeds = {id(generator.state) for generator in seed_generators_of(model)}
    found = [v for v in model.variables if id(v) not in seeds]
    for layer in model._flatten_layers():
        own = [item for item in items_of(vars(layer)) if isinstance(item, DistributedVariable)]
        found += [item for item in own if item.aggregation == tf.VariableAggregation.NONE]
    return [v for v in found if _is_mirrored(v)]


def _devices_of_others() -> set[str]:
    devices = tf.distribute.get_strategy().extended.worker_devices
    return set(devices) - {devices[local_replica()]}


def _is_mirrored(variable: Any) -> bool:
    is_distributed = isinstance(getattr(variable, "_value", variable), DistributedVariable)
    return is_distributed and not is_kept_per_replica(variable)


def _part(variable: Any) -> tf.Variable:
    return parts_of_variable(variable)[local_replica()]


def _is_among(variable: Any, others: list[Any]) -> bool:
    return any(variable is other for other in others)


def _rule(variable: Any) -> str:
    if not isinstance(variable, keras.Variable):
        return "none"
    # A weight has to be the same everywhere at once.
    return "mean" if variable.trainable and variable.aggregation == "none" else variable.aggregation


def _is_averaged(variable: Any) -> bool:
    return _part(variable).dtype.is_floating and _rule(variable) in ("none", "mean")


def _path(variable: Any) -> str:
    return variable.path if isinstance(variable, keras.Variable) else variable.name


def _is_of_keras(model: keras.Model, variable: Any) -> bool:
    """Whether it belongs to a layer of Keras' own, such as BatchNormalization."""
    owners = (layer for layer in model._flatten_layers() if any(v is variable for v in _variables_of(layer)))
    # Subclasses of them, too, but not of the base class that all layers have.
    classes = (one for owner in owners for one in type(owner).__mro__ if one is not keras.Layer)
    return any(one.__module__.startswith("keras.src.layers.") for one in classes)


def _variables_of(layer: keras.Layer) -> list[keras.Variable]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]


def _sum(step: KerasStep, value: tf.Tensor) -> tf.Tensor:
    if step.counts is not None:
        value = tf.cond(step.counts, lambda: value, lambda: tf.zeros_like(value))
    return all_reduce_sum([value])[0]


def _of_first_replica(value: tf.Tensor) -> tf.Tensor:
    # The others add zeros.
    wire = tf.cast(value, tf.int32) if value.dtype == tf.bool else to_wire(value)
    return from_wire(collectives.all_reduce(wire if global_replica() == 0 else tf.zeros_like(wire)), value.dtype)
