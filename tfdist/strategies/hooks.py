"""The interface of all strategies, `StrategyHooks`: what Keras asks a strategy.

A new data-parallel strategy begins like strategies/mirrored.py, with `DataParallelHooks`; any other one begins here.
compat/keras.py lists the functions of Keras, and which of these methods is called in place of each. Above it, in
`StrategyTraits`, stands what tfdist itself asks. A strategy sets an object of its own subclass as its `_keras_hooks`:

StrategyHooks           checks models, builds them from the data's specification, prepares them; arranges callbacks
  DataParallelHooks     data_parallel/strategy.py: replicas share the rows of a batch
  PipelineHooks         pipeline/strategy.py
  ParameterServerHooks  parameter_server/strategy.py
  HostOffloadHooks      host_offload.py
  _WithoutStrategy      models that have no tfdist strategy

Then follow `install`, which patches Keras, and what the methods are made of: XLA, building a model, models that were
checked. What is called in a step does not depend on the strategy: steps/in_step.py.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist import compat
from tfdist.compat.keras import StrategyTraits
from tfdist.compat.upstream import compute_output_spec, model_supports_jit
from tfdist.inspection.datasets import batch_specification, note_iterator
from tfdist.inspection.model_state import optimizers_of, own_methods
from tfdist.memory.application import apply
from tfdist.memory.modes import applied, automatic_of
from tfdist.runtime.chief import Arranged, check_paths, replaced
from tfdist.runtime.job import joined
from tfdist.runtime.progress import add_reporter
from tfdist.steps import in_step
from tfdist.steps.attributes import built_quietly
from tfdist.steps.keras_step import shadowed
from tfdist.strategies import validation
from tfdist.supervision.progress import ProgressWriter
from tfdist.supervision.time_spent import time_spent

_log = logging.getLogger("tfdist")
_STEPS = ("train_step", "test_step")
# Models that were checked and built as they are: `train_on_batch` would look at all attributes of all layers again.
# What is compiled for a model does not become another before `compile` is called. Weak on both sides: the functions of
# a model hold it.
_checked: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()


class StrategyHooks(StrategyTraits):
    """The interface of a strategy: what Keras asks it, with what most strategies answer.

    A new strategy implements `check`, and what differs of the others. Each is given the function of Keras that it
    stands for, and its arguments. A strategy also says what `StrategyTraits` declares, where that differs.

    Args:
        strategy: whose models they are; `None` for models without a tfdist strategy.
        memory: the memory policy that its models get, or `None`.
    """

    def __init__(self, strategy: Any = None, memory: Any = None):
        self._strategy = strategy
        self.memory = memory

    def check(self, model: Any) -> None:
        """Refuses what cannot be right under this strategy; called before a model is built, and after."""
        raise NotImplementedError

    def begin(self, model: Any) -> None:
        """Called for a model that is built, before each call of Keras that trains or evaluates it."""

    def prepare(self, model: Any) -> None:
        """Called after a model was built, and its memory policy applied."""

    def make_epoch_iterator(self, make: Callable, iterator: Any, **arguments: Any) -> None:
        """Initializes Keras' `EpochIterator` of a call of fit, evaluate or predict."""
        make(iterator, **arguments)

    def build(self, build: Callable, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
        """Builds a compiled model before it is trained or evaluated, from an iterator of its data, or from a batch."""
        if not self._is_new(model, iterator):
            self.begin(model)
            return
        self.check(model)
        # Keras takes a batch from the iterator to learn its shapes: a generator has then lost its first one, a shuffled
        # dataset begins with its second order, and of several workers' batches it cannot make one. The dataset's
        # specification says the same.
        with self._strategy.scope():
            build_for_steps(model, data_batch if iterator is None else batch_specification(iterator))
        self.begin(model)
        # Once more: Keras builds metrics, and shows their variables, only now.
        self.check(model)
        if self.memory is not None and applied(model) is None:
            apply(model, self.memory)
            if (automatic := automatic_of(model)) is not None:
                automatic.note_data(iterator, data_batch)
        self.prepare(model)
        note_checked(model)

    def _is_new(self, model: Any, iterator: Any) -> bool:
        """Whether a model has to be checked and built; `*_on_batch` comes here with each batch."""
        if iterator is not None:
            note_iterator(model, iterator)
        elif is_checked(model):
            return False
        validation.check_optimizers(model)
        return True

    def decide_jit_compile(self, decide: Callable, model: Any) -> bool:
        """What `compile(jit_compile="auto")` means for a model."""
        return decide(model)

    def make_function(self, make: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Makes the function of a training, test or predict step."""
        return make(model, *args, **kwargs)

    def make_predict_function(self, make: Callable, model: Any, force: bool = False) -> Any:
        """Makes `model.predict_function`, and returns it."""
        return make(model, force)

    def initialize_variable(self, initialize: Callable, variable: Any, value: Any) -> None:
        """Makes the `tf.Variable` of a Keras variable in this strategy's scope."""
        initialize(variable, value)

    def read_metrics(self, read: Callable, model: Any, logs: Any) -> Any:
        """Reads the results of metrics at the end of an epoch."""
        return read(model, logs)

    def concatenate(self, concatenate: Callable, value: Any, strategy: Any) -> Any:
        """What `predict` returns of the rows that the replicas have predicted of a batch."""
        return concatenate(value, strategy)

    def save(self, write: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Saves or exports a model."""
        return write(model, *args, **kwargs)

    def save_or_ask(self, save: Callable, model: Any, *args: Any, **kwargs: Any) -> None:
        """`model.save` and `save_weights`, which may ask before they overwrite a file."""
        save(model, *args, **kwargs)

    def fits_into_memory(self, decide: Callable, model: Any) -> bool:
        """Whether Keras may keep a whole .keras file in memory while it writes or reads it."""
        return decide(model)

    def fit(self, fit: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        """`model.fit`."""
        try:
            return self.call(fit, model, *args, **kwargs)
        finally:
            time_spent().goes_into(None)  # a program may go on after an exception

    def call(self, method: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        """A method of a model that trains, evaluates or predicts."""
        if self._strategy is not None:
            validation.check_scope(self._strategy, model)
        try:
            return method(model, *args, **kwargs)
        except BaseException:
            if (reporter := ProgressWriter.from_environment()) is not None:
                reporter.failed()
            raise

    def set_model(self, set_model: Callable, callback_list: Any, model: Any) -> None:
        """Keras gives its list of callbacks a model."""
        if model:
            self.arrange_callbacks(callback_list, model)
        set_model(callback_list, model)

    def arrange_callbacks(self, callback_list: Any, model: Any) -> None:
        """Puts other callbacks in the place of some, adds tfdist's own, and sets their order."""
        strategy = getattr(model, "_distribute_strategy", None)
        job = joined()
        # Without a strategy of tfdist, this process may still be one of several.
        is_chief = getattr(strategy, "is_chief", job is None or job.peers.rank == 0)
        callbacks = replaced(callback_list, callback_list.callbacks, is_chief)
        validation.check_callbacks(callbacks)
        check_paths(callbacks, is_chief)
        callbacks = self._arrange(callback_list, callbacks, model)
        for callback in list(callbacks):
            if isinstance(callback, Arranged):
                callbacks = callback._arrange(callback_list, callbacks)
        add_reporter(callbacks, model)
        callback_list.callbacks = callbacks

    def _arrange(self, callback_list: Any, callbacks: list, model: Any) -> list:
        """The callbacks of a fit, some replaced or added."""
        return callbacks

    def file_of_cache(self, path: str) -> str:
        job = joined()
        return path if job is None or len(job.peers.names) == 1 else f"{path}.rank{job.peers.rank}"


class _WithoutStrategy(StrategyHooks):
    """Models without a tfdist strategy."""

    def make_epoch_iterator(self, make: Callable, iterator: Any, **arguments: Any) -> None:
        validation.warn_without_scope()
        make(iterator, **arguments)

    def build(self, build: Callable, model: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if not self._is_new(model, iterator):
            return
        validation.warn_without_scope()
        validation.check_without_strategy(model)
        build(model, iterator=iterator, data_batch=data_batch)
        note_checked(model)


def install() -> None:
    """Installs tfdist's patches of Keras and TensorFlow, once; called by whatever needs them, never at import."""
    compat.install(_WithoutStrategy(), in_step)


def jit_compiles_by_itself(model: keras.Model) -> bool:
    """What `jit_compile="auto"` means: the same as without a strategy."""
    return bool(tf.config.list_physical_devices("GPU")) and model_supports_jit(model)


def not_compiled_as_a_whole(model: keras.Model) -> contextlib.AbstractContextManager[None]:
    """While Keras makes the function of a step, keeps it from compiling the function as a whole.

    XLA would have to compile the collectives, and all devices. The strategy marks a replica's operations instead.
    """
    return shadowed(model, _jit_compile=False)


def is_checked(model: Any) -> bool:
    """Whether a model has the functions of steps, and the optimizer, that `note_checked` was told of."""
    noted = _checked.get(model)
    return noted is not None and all(
        (reference is not None and reference() is part) or reference is part is None
        for reference, part in zip(noted, _parts(model), strict=True)
    )


def note_checked(model: Any) -> None:
    """Notes a model that was checked and built; one that has compiled nothing yet is looked at once more."""
    parts = _parts(model)
    if parts[:2] != (None, None):
        _checked[model] = tuple(None if part is None else weakref.ref(part) for part in parts)


def _parts(model: Any) -> tuple:
    return model.train_function, model.test_function, model.optimizer


def build_for_steps(model: keras.Model, specification: Any) -> None:
    """Builds a model, its metrics, its loss and its optimizers, in the scope of its strategy.

    Args:
        model: a compiled model.
        specification: of a batch: a structure of what has a shape and a dtype.

    Raises:
        Exception: what Keras raises for a model that cannot be called, unless it has a step of its own.
    """
    own = own_methods(model, *_STEPS)
    try:
        with warnings.catch_warnings(record=True) as warned, built_quietly(model):
            model._symbolic_build(data_batch=specification)
        _warn_again(warned)
    except Exception as error:
        if model.run_eagerly and _can_be_called_eagerly(model, specification):
            return
        # Of a model that cannot be called Keras warns, too.
        if not own:
            _warn_again(warned)
            raise
        _log.debug("%s cannot be called (%s); its own steps build it", model.name, error)
        try:
            for name in own:
                trace_step(model, getattr(model, name), specification)
        except Exception:
            # Of a model whose variables cannot be made, say: what has failed first tells why.
            raise error from None


def _can_be_called_eagerly(model: keras.Model, specification: Any) -> bool:
    """Builds a model whose `call` looks at values, from two rows of zeros; returns whether it could."""

    def zeros(one: Any) -> tf.Tensor | None:
        shape = None if one is None else [2 if size is None else size for size in one.shape]
        return None if one is None else tf.zeros(shape, keras.backend.standardize_dtype(one.dtype))

    try:
        batch = tf.nest.map_structure(zeros, specification)
        outputs = model(keras.utils.unpack_x_y_sample_weight(batch)[0], training=False)
        with shadowed(model, call=lambda *_, **__: outputs):
            model._symbolic_build(data_batch=specification)
    except Exception as error:
        _log.debug("%s cannot be called eagerly (%s)", model.name, error)
        return False
    return True


def _warn_again(warned: list[warnings.WarningMessage]) -> None:
    for one in warned:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


def trace_step(model: keras.Model, step: Callable, specification: Any) -> None:
    """Builds what only a step of a model's own does: layers that its `call` does not reach, optimizers beside its own.

    What the step raises is suppressed.
    """
    batch = tf.nest.map_structure(
        lambda x: None if x is None else keras.KerasTensor(x.shape, keras.backend.standardize_dtype(x.dtype)),
        specification,
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(built_quietly(model))
        for optimizer in optimizers_of(model):
            stack.enter_context(shadowed(optimizer, apply=_builds_only(optimizer)))
        # A step that fails here fails once more where it is trained, with all that belongs to its error.
        stack.enter_context(contextlib.suppress(Exception))
        compute_output_spec(step, batch)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _builds_only(optimizer: keras.optimizers.Optimizer) -> Callable:
    def apply(grads: Any, trainable_variables: Any = None) -> None:
        if trainable_variables is not None and not optimizer.built:
            with tf.init_scope():
                optimizer.build(list(trainable_variables))

    return apply
