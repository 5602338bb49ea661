"""What all workers begin a period from, and the optimizer that moves it."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.scopes import outside_of_scope
from tfdist.inspection.model_state import all_optimizers_of, held_variables, own_copy
from tfdist.steps.derived_logs import metric_of
from tfdist.steps.gradients import all_reduce_sum
from tfdist.steps.keras_step import shadowed
from tfdist.strategies.data_parallel.replica_step import agreement_of
from tfdist.strategies.data_parallel.state import is_mirrored
from tfdist.strategies.local_steps.sending import Sending, in_parts
from tfdist.strategies.validation import check_float8


def trainable_variables(model: keras.Model) -> list[keras.Variable]:
    """The weights that a model's optimizers may update, each once."""
    of_optimizers = [v for one in all_optimizers_of(model) for v in getattr(one, "_trainable_variables", None) or ()]
    return list({id(v): v for v in (*model.trainable_variables, *of_optimizers)}.values())


class OuterModel:
    """What all workers begin a period from, and the optimizer that moves it. To be made in the strategy's scope.

    Which weights the training step updates, and what other state it writes, is seen while it is traced.

    Args:
        strategy: whose model it is.
        model: a model that is built, with its optimizers.
        optimizer: the outer optimizer.

    Attributes:
        is_shown: whether the model has the weights of the period's beginning now.
        has_rows: in the step that is traced, whether this worker has rows of the batch; `None` if it certainly has.
        origins: for each of the step's logs, the metric whose result it is, and which of its numbers, or `None`.
        was_left_out: whether the other workers have gone on without this one.
        stops: whether another worker stops training at the end of the last period.
    """

    def __init__(self, strategy: Any, model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
        self._strategy, self._optimizer, self._model = strategy, optimizer, weakref.ref(model)
        self._trainable = trainable_variables(model)
        check_float8(self._trainable)
        make = functools.partial(keras.Variable, initializer="zeros", trainable=False)
        self._base = [make(shape=v.shape, dtype=v.dtype, name="base") for v in self._trainable]
        self._steps = make(shape=(), dtype="int64", name="steps")
        self._parts = in_parts([v.shape.num_elements() for v in self._trainable], strategy._fragments)
        # Of each part since it was sent, and the last one since all was exchanged.
        self._rows = make(shape=(len(self._parts) + 1,), dtype="int64", name="rows")
        self._sending = None
        if len(self._parts) > 1:
            self._sending = Sending(strategy, [[self._trainable[i] for i in part] for part in self._parts], make)
        self._longest = make(shape=(), dtype="int64", name="longest")
        optimizer.build(self._trainable)
        if strategy._compressor is not None:
            strategy._compressor.make_all(optimizer)
        # Ids of what optimizers have updated, and what else was written, with what it was when the period began.
        self._updated: set[int] = set()
        self._state: dict[int, tuple[Any, tf.Variable]] = {}
        self.is_shown, self.has_rows, self.origins = False, None, []
        # What the last round has said, where workers come and go.
        self.was_left_out, self.stops = False, False

    def is_of(self, model: keras.Model) -> bool:
        """Whether it was made for these weights of a model; another optimizer may train others."""
        return list(map(id, trainable_variables(model))) == list(map(id, self._trainable))

    def trains_one_of(self, weights: set[int]) -> bool:
        """Whether it trains one of the weights with these ids."""
        return any(id(v) in weights and self._is_trained(v) for v in self._trainable)

    def _is_trained(self, variable: keras.Variable) -> bool:
        return id(variable) in self._updated or not self._updated  # not traced yet, after a backup was restored

    @property
    def _trained(self) -> list[tuple[keras.Variable, keras.Variable]]:
        """The weights that optimizers have updated, each with its base."""
        pairs = zip(self._trainable, self._base, strict=True)
        return [(variable, base) for variable, base in pairs if self._is_trained(variable)]

    @property
    def _other_state(self) -> list[tuple[Any, tf.Variable]]:
        """What else the step writes, each with what it was when the period began."""
        # A step may assign a weight that an optimizer updates afterwards.
        return [pair for key, pair in self._state.items() if key not in self._updated]

    @property
    def variables(self) -> list[keras.Variable]:
        """Its own state, for backups."""
        of_sending = self._sending.variables if self._sending else []
        compressor = self._strategy._compressor
        rests = compressor.variables_of(self._optimizer).values() if compressor else []
        return [self._steps, self._rows, self._longest, *of_sending, *self._base, *self._optimizer.variables, *rests]

    @property
    def steps_in_period(self) -> int:
        """How many steps this worker has taken since the last exchange of all parts."""
        return int(own_copy(self._steps))

    @property
    def is_in_period(self) -> bool:
        """Whether this worker has trained since then."""
        return self.steps_in_period > 0

    # While a step is traced

    @contextlib.contextmanager
    def noting(self, model: keras.Model) -> Iterator[None]:
        """While a step is traced, notes which weights of the model it writes; without rows it writes none."""

        def assign(variable: keras.Variable, original: Callable, value: Any) -> Any:
            self._note_state(variable)
            if self.has_rows is not None:
                value = tf.where(self.has_rows, tf.cast(value, variable.dtype), variable.value)
            return original(value)

        with contextlib.ExitStack() as stack:
            for variable in model.weights:
                noting = functools.partial(assign, variable, variable._direct_assign)
                stack.enter_context(shadowed(variable, _direct_assign=noting))
            with shadowed(self._strategy, _traced_outer=self), shadowed(self, has_rows=None):
                yield
        for variable in filter(is_mirrored, held_variables(model)):
            self._note_state(variable)

    def _note_state(self, variable: Any) -> None:
        if id(variable) not in self._state and id(variable) not in self._updated:
            with tf.init_scope(), outside_of_scope(), tf.device(self._strategy.extended.worker_devices[0]):
                self._state[id(variable)] = variable, tf.Variable(own_copy(variable), trainable=False)

    def note_update(self, variables: Any) -> None:
        """Notes that an optimizer updates variables."""
        known = set(map(id, self._trainable))
        for variable in variables:
            if id(variable) not in known:
                raise ValueError(
                    f"Received: a train_step that updates '{getattr(variable, 'path', variable.name)}', which is no "
                    "trainable weight of the model, and not of an optimizer that is built. Expected: layers and "
                    "optimizers as attributes of the model."
                )
            self._updated.add(id(variable))

    def note_logs(self, logs: Any) -> None:
        """Notes which of a step's logs are results of metrics."""
        self.origins = list(map(metric_of, tf.nest.flatten(logs)))

    def begin_fit(self) -> None:
        """Before steps: what the program has assigned since the last period belongs to the beginning of the next."""
        for variable, base in () if self.is_in_period else self._other_state:
            base.assign(own_copy(variable).read_value())

    def begin_step(self) -> None:
        """Before a training step: the first one of a period keeps the weights."""
        tf.cond(tf.equal(own_copy(self._steps).read_value(), 0), self._keep_base, lambda: tf.constant(True))

    def _keep_base(self) -> tf.Tensor:
        for base, variable in zip(self._base, self._trainable, strict=True):
            own_copy(base).assign(own_copy(variable).read_value())
        return tf.constant(True)

    def end_step(self, rows: tf.Tensor) -> None:
        """After a training step: the last one of a period exchanges.

        Args:
            rows: how many this worker has had in it.
        """
        own_copy(self._steps).assign_add(1)
        own_copy(self._rows).assign_add(tf.fill([len(self._parts) + 1], tf.cast(rows, tf.int64)))
        steps, turn = own_copy(self._steps).read_value(), self._strategy._sync_every // len(self._parts)
        if self._sending is None:
            tf.cond(steps >= turn, self._synchronize, lambda: tf.constant(True))
        else:
            turns = [functools.partial(self._take_turn, part) for part in range(len(self._parts))]
            which = tf.cast((steps // turn - 1) % len(self._parts), tf.int32)
            tf.cond(tf.equal(steps % turn, 0), lambda: tf.switch_case(which, turns), lambda: tf.constant(True))

    # Exchanges

    def end_period(self) -> None:
        """Exchanges now, if the workers have trained since the last time; all come here after the same step."""
        if not self.is_in_period:
            return
        if self._sending is not None and (part := self._sending.part_on_its_way) is not None:
            self._receive(part)
        self._synchronize()

    def _take_turn(self, part: int) -> tf.Tensor:
        """Receives the part that was sent last, and sends this one."""
        before = (part - 1) % len(self._parts)
        tf.cond(self._sending.is_on_its_way(), lambda: self._receive(before), lambda: tf.constant(True))
        pairs = [(own_copy(self._base[i]), own_copy(self._trainable[i])) for i in self._parts[part]]
        rows = own_copy(self._rows).read_value()[part]
        differences = [base.read_value() - weight.read_value() for base, weight in pairs]
        self._sending.send(part, differences, rows, agreement_of(self._model()))
        own_copy(self._rows).scatter_nd_update([[part]], tf.zeros([1], tf.int64))
        return tf.constant(True)

    def _receive(self, part: int) -> tf.Tensor:
        """Takes an outer step of a part, and adds what this worker has learned of it since it was sent."""
        own, means = self._sending.receive(part, agreement_of(self._model()))
        chosen = [
            (self._trainable[i], own_copy(self._trainable[i]), own_copy(self._base[i]), sent, mean)
            for i, sent, mean in zip(self._parts[part], own, means, strict=True)
            if self._is_trained(self._trainable[i])
        ]
        since = [weight.read_value() - (base.read_value() - sent) for _, weight, base, sent, _ in chosen]
        for _, weight, base, _, _ in chosen:
            weight.assign(base.read_value())
        # An outer step is that of all parts, also of those of which no optimizer updates a weight.
        count = own_copy(self._optimizer.iterations)
        steps = count.read_value()
        if chosen:
            self._step([mean for *_, mean in chosen], [variable for variable, *_ in chosen])
        count.assign(steps + int(part + 1 == len(self._parts)))
        for (variable, weight, base, _, _), learned in zip(chosen, since, strict=True):
            base.assign(weight.read_value())
            new = weight.read_value() + learned
            weight.assign(new if variable.constraint is None else variable.constraint(new))
        return tf.constant(True)

    def _step(self, differences: list[tf.Tensor], variables: list[keras.Variable]) -> None:
        """The outer step of variables that have their bases' values."""

        def on_replica() -> None:
            with self._strategy._alone():
                self._optimizer.apply(differences, variables)

        self._strategy.extended.call_here(on_replica)

    @property
    def most_steps(self) -> int:
        """How many steps the longest period had."""
        return int(own_copy(self._longest))

    def _synchronize(self) -> tf.Tensor:
        self._strategy.extended.call_here(self._exchange)
        longest, steps = own_copy(self._longest), own_copy(self._steps)
        period = tf.minimum(steps.read_value(), self._strategy._sync_every)
        longest.assign(tf.maximum(longest.read_value(), period))
        self._begin_period()
        return tf.constant(True)

    def _begin_period(self) -> None:
        for count in (self._steps, self._rows):
            own_copy(count).assign(tf.zeros_like(own_copy(count)))

    def _exchange(self) -> None:
        model, compressor = self._model(), self._strategy._compressor
        if self._strategy.membership is not None:
            self._exchange_with_members(model)
            return
        # The momentum of the outer optimizer may be the method's, until the step was taken.
        with compressor.prepared(self._optimizer) if compressor else contextlib.nullcontext() as settings:
            self._exchange_with_all(model, settings)

    def _exchange_with_all(self, model: keras.Model, settings: Any) -> None:
        rows = tf.cast(own_copy(self._rows).read_value(), tf.float64)
        agreement = agreement_of(model)
        totals, *requests = all_reduce_sum([rows, *([agreement.read()] if agreement else [])])
        if agreement:
            agreement.keep_sum(requests[0])
        *shares, share_of_all = tf.unstack(tf.math.divide_no_nan(rows, totals))
        means: dict[int, tf.Tensor] = {}
        for number, (part, share) in enumerate(zip(self._parts, shares, strict=True)):
            if self._sending is not None and not int(totals[number]):
                continue  # it has just been received
            chosen = [i for i in part if self._is_trained(self._trainable[i])]
            pairs = [(own_copy(self._base[i]), own_copy(self._trainable[i])) for i in chosen]
            differences = [base.read_value() - weight.read_value() for base, weight in pairs]
            means |= zip(chosen, self._mean(differences, chosen, share, settings), strict=True)
        self._average_state(model, share_of_all)
        for variable, base in self._trained:
            own_copy(variable).assign(own_copy(base).read_value())
        self._step(list(means.values()), [self._trainable[i] for i in means])

    def _mean(self, differences: list[tf.Tensor], places: list[int], share: tf.Tensor, settings: Any) -> list:
        """The mean difference of some weights over all workers."""
        compressor, options = self._strategy._compressor, self._strategy._gradient_options
        if compressor is None:
            return all_reduce_sum(differences, options, share)
        weights = [self._trainable[i] for i in places]
        return compressor.all_reduce_sum(
            self._optimizer, differences, weights, [], share, options.bucket_bytes, settings
        )

    def _exchange_with_members(self, model: keras.Model) -> None:
        rows, options = own_copy(self._rows).read_value()[0], self._strategy._gradient_options
        trained = [(variable, own_copy(variable), own_copy(base)) for variable, base in self._trained]
        differences = [base.read_value() - weight.read_value() for _, weight, base in trained]
        sent = [tf.cast(one, options.dtype or one.dtype) for one in differences]
        floats, pairs, others, means = self._state_to_average(model)
        firsts = [v.read_value() for v in others]
        found = iter(self._strategy._keras_hooks.brought(model, rows, [*sent, *means], firsts))
        received = [tf.cast(next(found), one.dtype) for one in differences]
        self._assign_state(floats, pairs, others, found)
        for _, weight, base in trained:
            weight.assign(base.read_value())
        self._step(received, [variable for variable, *_ in trained])

    def end_epoch(self) -> None:
        """Ends the period, or says that there is none to end, where workers come and go."""
        if self.is_in_period:
            self.end_period()
        else:
            self._strategy._keras_hooks.bring(self._model())

    def taken(self) -> None:
        """After rank 0's state was taken, of which this worker has seen no rows."""
        own_copy(self._rows).assign(tf.zeros_like(own_copy(self._rows)))
        self.was_left_out, self.stops = False, False

    def _average_state(self, model: keras.Model, share: tf.Tensor) -> None:
        """Other state: means over the rows; of what is not a float, rank 0's value."""
        floats, pairs, others, values = self._state_to_average(model)
        means = all_reduce_sum(values, weight=share)
        is_first = int(self._strategy.extended._input_position()[1] == 0)
        firsts = all_reduce_sum([tf.cast(v.read_value(), tf.int64) * is_first for v in others])
        self._assign_state(floats, pairs, others, iter([*means, *firsts]))

    def _state_to_average(self, model: keras.Model) -> tuple[list[Any], list[Any], list[Any], list[tf.Tensor]]:
        """What else a step writes: floats, complex numbers, whole numbers; and what is averaged of the first two."""
        if self._updated and not model.run_eagerly:
            written = [variable for variable, _ in self._other_state]
        else:
            # Rows may decide what a step that runs eagerly writes; and after a restart, none was seen.
            trained = {id(variable) for variable, _ in self._trained}
            written = [v for v in (*model.weights, *filter(is_mirrored, held_variables(model))) if id(v) not in trained]
        averages = [
            variable
            for optimizer in all_optimizers_of(model)
            for variable in getattr(optimizer, "_model_variables_moving_average", None) or ()
        ]
        parts = list(map(own_copy, [*written, *averages]))
        wide = set(map(id, parts[: len(written)]))
        floats, pairs = ([v for v in parts if getattr(v.dtype, kind)] for kind in ("is_floating", "is_complex"))
        others = [v for v in parts if v.dtype.is_integer or v.dtype.is_bool]
        # Frozen weights may be among them: in float64, the mean of equal values rounds to that value.
        sent = [tf.cast(v.read_value(), tf.float64) if id(v) in wide else v.read_value() for v in floats]
        halves = [half(v.read_value()) for v in pairs for half in (tf.math.real, tf.math.imag)]
        return floats, pairs, others, [*sent, *halves]

    def _assign_state(
        self, floats: list[Any], pairs: list[Any], others: list[Any], values: Iterator[tf.Tensor]
    ) -> None:
        """Assigns what was averaged; of complex numbers, the halves come one after the other."""
        for variable in floats:
            variable.assign(tf.cast(next(values), variable.dtype))
        for variable in pairs:
            variable.assign(tf.complex(next(values), next(values)))
        for variable in others:
            variable.assign(tf.cast(next(values), variable.dtype))
        for variable, base in self._other_state:
            base.assign(own_copy(variable).read_value())

    # What others see in the middle of a period

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While the block runs, the model has the weights and state of the period's beginning, as on all workers."""
        if self.is_shown or not self.is_in_period:
            yield
            return
        pairs = [(own_copy(variable), own_copy(base)) for variable, base in [*self._trained, *self._other_state]]
        own = [tf.identity(variable) for variable, _ in pairs]
        self.is_shown = True
        try:
            for variable, base in pairs:
                variable.assign(base.read_value())
            yield
        finally:
            for (variable, _), value in zip(pairs, own, strict=True):
                variable.assign(value)
            self.is_shown = False

    def restored(self, of_others: bool) -> None:
        """After a backup was restored; that of another number of workers begins another period from this one's base."""
        if self._sending is not None:
            self._sending.forget(of_others)
        if of_others and self.is_in_period:
            for variable, base in self._trained:
                own_copy(variable).assign(own_copy(base).read_value())
        if of_others:
            self._begin_period()
