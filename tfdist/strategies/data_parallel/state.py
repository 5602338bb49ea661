"""State of layers, other than weights and metrics, that a step updates on each replica from that replica's own rows.

Moving statistics, codebooks, centres, queues: without exchange the replicas' copies drift apart. A variable's
`aggregation` says how they are made the same again; where it says nothing they are averaged by rows. What the replicas
compute alike, such as the weights of a momentum encoder, is never sent anywhere.

How `BatchNormalization` computes is in batch_norm.py; its moving statistics are averaged here.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.compat.keras import hooks_of
from tfdist.compat.upstream import DistributedVariable, in_stateless_scope
from tfdist.inspection.model_state import (
    all_optimizers_of,
    held_variables,
    is_kept_per_replica,
    is_sharded,
    items_of,
    optimizers_of,
    parts_of_variable,
    seed_generators_of,
)
from tfdist.steps.attributes import reached_from
from tfdist.steps.gradients import all_reduce_sum, sum_over_replicas
from tfdist.steps.keras_step import KerasStep, local_replica, shadowed
from tfdist.steps.local_values import Dependence, LocalValues, only_updates
from tfdist.steps.reduce import all_reduce, of_first_replica

NO_MEAN = (
    "which equals one process only for updates that are linear in means over the rows: not for queues of rows, counts "
    "or maxima"
)
_BY_ROW = (
    *(keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed),
    *(keras.layers.Dropout, keras.layers.SpatialDropout1D, keras.layers.SpatialDropout2D, keras.layers.AlphaDropout),
    *(keras.layers.GaussianDropout, keras.layers.GaussianNoise),
)
# As Keras names the state of a SeedGenerator, from which each replica draws others.
_SEEDS = "seed_generator_state"
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
        # Those of them that have random numbers, with which each replica has drawn something else.
        self._drawn: list[Any] = []
        self._updated: set[int] = set()
        # Paths of variables whose value may differ from one process', by what is kept and why.
        self._unsafe: dict[tuple[str, str], list[str]] = {}
        self.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        found = _state_of(step.model)
        # Only Keras' own variables tell in an eager step that they are assigned.
        self._silent = [v for v in found if not isinstance(v, keras.Variable)]
        self._watched = watched = [*found, *_learning_rates(step.model)]
        if self.graph is None:
            return
        optimizers = [v for optimizer in optimizers_of(step.model) for v in optimizer.variables if is_mirrored(v)]
        self._by_handle = {id(_part(v).handle): v for v in watched}
        self._values = LocalValues(
            self.graph,
            tf.nest.flatten(data, expand_composites=True),
            same=[_part(v) for v in (*watched, *optimizers)],
            watched=[_part(v) for v in watched],
            others=devices_of_others(),
            by_row=scopes_by_row(step.model),
            is_more=self._is_more,
        )

    def take_averaged(self) -> list[Any]:
        """Returns the variables that have to be averaged now, and removes them from those that were written."""
        if not self._can_meet():
            return []  # steps that do not take this branch average them, too
        self._look()
        due = [v for v in self._pending if _is_averaged(v) and not _is_among(v, self._drawn)]
        self._pending = [v for v in self._pending if not _is_among(v, due)]
        return due

    def skip(self) -> None:
        """Takes what was written since the last look for global: an optimizer has written it."""
        if self.graph is not None and self._can_meet():
            self._values.skip()

    def note_updates(self, variables: Iterable[Any]) -> None:
        """Notes that an optimizer writes variables: in a branch it looks as if each replica had its own values."""
        if self.graph is not None and not self._can_meet():
            self._updated |= {id(_part(variable).handle) for variable in variables}

    def dependence_of(self, value: tf.Tensor) -> Dependence:
        """How a tensor of the step depends on the replica's rows."""
        if not self._can_meet():
            return Dependence.MIXED
        self._look()
        return self._values.dependence_of(value)

    def is_of_no_row(self, value: tf.Tensor) -> bool:
        """Whether it is known of a tensor of the step that no row of the batch is in it."""
        if self.graph is None or not self._can_meet():
            return False
        self._look()
        return self._values.is_of_no_row(value)

    def synchronize(self) -> None:
        """At the end of the step, makes local values that it has written the same on all replicas."""
        if self.graph is None:
            self._pending += self._silent
        if averaged := self.take_averaged():
            assign(averaged, all_reduce_sum(values_of(averaged), weight=self._step.weight))
        firsts, self._pending = self._pending, []
        assign(firsts, [of_first_replica(value) for value in values_of(firsts)])
        self._warn_of_unsafe()

    def assign(self, variable: keras.Variable, value: Any) -> None:
        """Assigns a variable in the step; what its `aggregation` says is done at once."""
        part, rule = _part(variable), rule_of(variable)
        value = tf.cast(tf.convert_to_tensor(value), part.dtype)
        if not self._can_meet() or rule == "none":
            part.assign(value)
            self.note(variable)
            return
        if rule == "sum":
            value = sum_over_replicas(self._step, value)
        elif (dependence := self._dependence_for(variable, value)) is not Dependence.SAME:
            if _is_averaged(variable) and dependence is not Dependence.DRAWN:
                (value,) = all_reduce_sum([value], weight=self._step.weight)
            else:
                value = of_first_replica(value)
        part.assign(value)

    def note_draw(self, seed: tf.Tensor) -> None:
        """Notes a seed from which this replica draws other random numbers than the others."""
        if self.graph is not None and self._can_meet():
            self._values.take_for_drawn(seed)

    def note(self, variable: Any) -> None:
        """Notes that an eager step has assigned a variable."""
        if self.graph is None and _is_among(variable, self._watched) and not _is_among(variable, self._pending):
            self._pending.append(variable)

    def add(self, variable: keras.Variable, value: Any) -> None:
        """Adds to a variable with `aggregation="sum"` what all replicas add."""
        part = _part(variable)
        value = tf.cast(tf.convert_to_tensor(value), part.dtype)
        part.assign_add(sum_over_replicas(self._step, value) if self._can_meet() else value)

    def adds_up(self, value: tf.Tensor) -> bool:
        """Whether the replicas' values add up to that of the global batch."""
        if self.graph is not tf.compat.v1.get_default_graph():
            return False
        self._look()
        return self._values.adds_up(value)

    def _can_meet(self) -> bool:
        """Replicas cannot exchange values in a branch or a loop of the step's graph."""
        return self.graph is None or self.graph is tf.compat.v1.get_default_graph()

    def _dependence_for(self, variable: keras.Variable, value: tf.Tensor) -> Dependence:
        if self.graph is None:
            return Dependence.MIXED
        self._look()
        dependence = self._values.dependence_of(value)
        if variable.trainable and dependence not in (Dependence.SAME, Dependence.DRAWN, Dependence.MEAN):
            self._warn(variable, NO_MEAN)
        return dependence

    def _look(self) -> None:
        """Finds the local values that were written since the last time."""
        if self.graph is None:
            self._agree_on_pending()
            return
        for access in self._values.accesses():
            variable = self._by_handle[access.handle]
            if access.is_write and access.handle in self._updated:
                self._updated.discard(access.handle)
                self._values.take_for_same(access.handle)
            elif access.is_write:
                self._note_write(variable, access.dependence)
            elif access.dependence is not Dependence.SAME and not only_updates(access.operation.outputs[0]):
                self._warn(variable, _READ_AFTER)

    def _is_more(self, handle: tf.Tensor) -> bool:
        """Whether a handle is that of a variable that no layer has, but a loss or another object: state as well."""
        variable = getattr(handle, "_distributed_container", lambda: None)()
        if variable is None or not is_mirrored(variable) or variable.aggregation != tf.VariableAggregation.NONE:
            return False
        if _part(variable).handle is not handle or _SEEDS in variable.name:
            return False
        model = self._step.model
        compressor = hooks_of(model.distribute_strategy).compressor
        kept = [v for one in optimizers_of(model) for v in compressor.variables_of(one).values()] if compressor else []
        if any(v._value is variable for v in kept):
            return False
        self._by_handle[id(handle)] = variable
        return True

    def _agree_on_pending(self) -> None:
        """Run eagerly, a step may assign a variable on some replicas only; all have to exchange the same ones."""
        if self._watched:
            assigned = tf.constant([float(_is_among(v, self._pending)) for v in self._watched])
            anywhere = all_reduce(assigned, differentiable=False).numpy()
            self._pending = [v for v, count in zip(self._watched, anywhere, strict=True) if count]

    def _note_write(self, variable: Any, dependence: Dependence) -> None:
        self._pending = [other for other in self._pending if other is not variable]
        self._drawn = [other for other in self._drawn if other is not variable]
        if dependence is Dependence.SAME:
            return
        if rule_of(variable) == "sum":
            raise NotImplementedError(
                f"Received: variable '{_path(variable)}' with aggregation='sum', assigned in a branch, a loop "
                "or a function (tf.cond, tf.while_loop, tf.map_fn, tf.function), where replicas cannot meet. Expected: "
                "assigned outside of it."
            )
        self._pending.append(variable)
        if dependence is Dependence.DRAWN:
            self._drawn.append(variable)
        elif dependence is not Dependence.MEAN and (rule_of(variable) == "none" or variable.trainable):
            self._warn(variable, NO_MEAN)

    def _warn(self, variable: Any, why: str) -> None:
        if local_replica() or is_of_keras(self._step.model, variable) or not is_new(variable, "state"):
            return
        kept = "replicas' average is" if _is_averaged(variable) else "first replica's value is"
        self._unsafe.setdefault((kept, why), []).append(_path(variable))

    def _warn_of_unsafe(self) -> None:
        for (kept, why), paths in self._unsafe.items():
            others = f" (and {len(paths) - 1} like it)" if len(paths) > 1 else ""
            warnings.warn(
                f"Received: variable '{paths[0]}'{others}, which each replica updates from its own rows of the batch. "
                f"The {kept} kept at the end of the step, {why}. Expected: "
                "add_weight(..., aggregation=) with 'mean', 'sum' or 'only_first_replica', where one of them is right "
                "as soon as it is assigned; or an update from the rows of all replicas, by "
                "tf.distribute.get_replica_context().all_gather(rows, axis=0). That context is None while a model is "
                "built.",
                stacklevel=2,
            )


@contextlib.contextmanager
def assignments_aggregated(step: KerasStep) -> Iterator[None]:
    """While a step is traced: assigning a variable of the model tells the replica's state."""
    with contextlib.ExitStack() as stack:
        for variable in step.model.variables:
            if is_mirrored(variable):
                stack.enter_context(shadowed(variable, **_assigning_methods(step, variable)))
        yield


def _assigning_methods(step: KerasStep, variable: keras.Variable) -> dict[str, Callable]:
    def through(name: str, own: Callable[[ReplicaState, Any], None]) -> Callable:
        def assign(value: Any) -> Any:
            state = None if tf.distribute.in_cross_replica_context() else step.here.state
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


def assign_part(step: KerasStep, variable: keras.Variable, value: Any) -> None:
    """Assigns to this replica's part of an optimizer's variable a value that it has computed as all replicas do."""
    if tf.distribute.in_cross_replica_context():
        type(variable)._direct_assign(variable, value)
    else:
        _part(variable).assign(tf.cast(value, _part(variable).dtype))
        if step.here.state is not None:
            step.here.state.note(variable._value)


def values_of(variables: Iterable[Any]) -> list[tf.Tensor]:
    """The values of this replica's parts of variables."""
    return [tf.convert_to_tensor(_part(v)) for v in variables]


def _state_of(model: keras.Model) -> list[Any]:
    """The state that a step may write: the model's variables without seeds, and `tf.Variable`s that layers hold."""
    seeds = {id(generator.state) for generator in seed_generators_of(model)}
    found = [v for v in model.variables if id(v) not in seeds]
    held = held_variables(model)
    if tf.executing_eagerly():  # a graph tells of all variables that it writes
        held += _of_other_objects(model, [*found, *held])
    found += [v for v in held if v.aggregation == tf.VariableAggregation.NONE]
    return [v for v in found if is_mirrored(v)]


def _of_other_objects(model: keras.Model, known: list[Any]) -> list[tf.Variable]:
    """Further variables that losses and other objects hold, but for those that optimizers train."""
    known += [v for optimizer in optimizers_of(model) for v in getattr(optimizer, "_trainable_variables", ())]
    seen, layers, found = {id(getattr(v, "_value", v)) for v in known}, set(map(id, model._flatten_layers())), []
    for one in reached_from(model):
        if id(one) in layers or isinstance(one, keras.optimizers.Optimizer):
            continue
        items = one._non_trainable_variables if isinstance(one, keras.Layer) else items_of(vars(one))
        values = [getattr(item, "_value", item) for item in items if isinstance(item, (keras.Variable, tf.Variable))]
        found += [value for value in values if id(value) not in seen]
        seen |= set(map(id, values))
    return found


def _learning_rates(model: keras.Model) -> list[tf.Variable]:
    """Those that a step may assign by what it has computed of its rows: averaged, as state is."""
    rates = [getattr(optimizer, "_learning_rate", None) for optimizer in all_optimizers_of(model)]
    return [rate._value for rate in rates if isinstance(rate, keras.Variable) and is_mirrored(rate)]


def scopes_by_row(model: keras.Model) -> re.Pattern | None:
    """Finds in the name of an operation a layer of Keras that computes each row by itself, in loops or at random.

    What such operations make of rows is not to be seen from one of them: the rows of a loop are along its second axis.
    """
    found, others = set(), set()
    for layer in model._flatten_layers():
        parts = list(layer._flatten_layers())
        is_keras = all(type(part).__module__.startswith("keras.src.layers.") for part in parts)
        mixes = any(isinstance(part, keras.layers.BatchNormalization) for part in parts)
        (found if isinstance(layer, _BY_ROW) and is_keras and not mixes else others).add(layer.name)
    names = "|".join(map(re.escape, found))
    # TensorFlow numbers the calls of a layer, and Keras its layers.
    scopes = re.compile(rf"(?:^|/)(?:{names})(?:_\d+)?/")
    return None if not found or any(scopes.search(f"{name}/") for name in others) else scopes


def devices_of_others() -> set[str]:
    """The devices of this process' other replicas."""
    devices = tf.distribute.get_strategy().extended.worker_devices
    return set(devices) - {devices[local_replica()]}


def is_mirrored(variable: Any) -> bool:
    """Whether each replica has a copy of a variable."""
    is_distributed = isinstance(getattr(variable, "_value", variable), DistributedVariable)
    return is_distributed and not is_kept_per_replica(variable) and not is_sharded(variable)


def _part(variable: Any) -> tf.Variable:
    return parts_of_variable(variable)[local_replica()]


def _is_among(variable: Any, others: list[Any]) -> bool:
    return any(variable is other for other in others)


def rule_of(variable: Any) -> str:
    """How replicas' values of a variable are brought together, as it says itself; "none" where it does not."""
    if not isinstance(variable, keras.Variable):
        return "none"
    # A weight has to be the same everywhere at once.
    return "mean" if variable.trainable and variable.aggregation == "none" else variable.aggregation


def _is_averaged(variable: Any) -> bool:
    return _part(variable).dtype.is_floating and rule_of(variable) in ("none", "mean")


def _path(variable: Any) -> str:
    return variable.path if isinstance(variable, keras.Variable) else variable.name


def is_of_keras(model: keras.Model, variable: Any) -> bool:
    """Whether it belongs to a layer of Keras' own, such as BatchNormalization."""
    owners = (layer for layer in model._flatten_layers() if any(v is variable for v in _variables_of(layer)))
    # Subclasses of them, too, but not of the base class that all layers have.
    classes = (one for owner in owners for one in type(owner).__mro__ if one is not keras.Layer)
    return any(one.__module__.startswith("keras.src.layers.") for one in classes)


def _variables_of(layer: keras.Layer) -> list[keras.Variable]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]
