"""What Keras asks of a strategy: the patches of this folder call these methods, and know no strategy by name.

    Keras' trainer, losses, metrics, ...  ->  patch (compat)  ->  hooks_of(strategy)  ->  the strategy's own answer

A tfdist strategy carries an object of a subclass in its attribute `_keras_hooks`. Models without a tfdist strategy get
what `install` was given, see `tfdist.strategies.keras_hooks`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any


class KerasHooks:
    """Answers as Keras itself would; subclasses override what they need.

    The last argument of most methods, a verb, does what Keras does.
    """

    is_data_parallel = False
    """Whether replicas share the rows of each batch."""

    runs_whole_steps = True
    """Whether a training step runs in this process, in one piece."""

    streams_weights = False
    """Whether weights are on the host, and the device sees those of one block at a time."""

    compressor: Any = None
    """What of its gradients a strategy has not sent yet, a `tfdist.compression.compressor.Compressor`, or `None`."""

    # The trainer.

    def make_epoch_iterator(self, iterator: Any, arguments: Mapping[str, Any], make: Callable[..., None]) -> None:
        """Initializes Keras' `EpochIterator` of a call of fit, evaluate or predict.

        Args:
            iterator: the object to initialize.
            arguments: of its `__init__`, without the strategy.
            make: called with such arguments.
        """
        make(**arguments)

    def build(self, model: Any, iterator: Any, data_batch: Any, build: Callable[[], None]) -> None:
        """Builds a model before it is trained or evaluated.

        Args:
            model: a compiled model.
            iterator: an `EpochIterator` of its data, or `None`.
            data_batch: a batch, where there is no iterator.
        """
        build()

    def decide_jit_compile(self, model: Any, decide: Callable[[], bool]) -> bool:
        """What `compile(jit_compile="auto")` means for a model."""
        return decide()

    def making_function(self, model: Any) -> Any:
        """A context in which Keras makes the function of a training, test or predict step."""
        return contextlib.nullcontext()

    def make_predict_function(self, model: Any, force: bool, make: Callable[[], Any]) -> Any:
        """Makes `model.predict_function`, and returns it."""
        return make()

    def before_metrics_are_read(self, model: Any) -> None:
        """Called before Keras reads the results of metrics at the end of an epoch."""

    def fit(self, model: Any, args: tuple, kwargs: dict, fit: Callable) -> Any:
        """`model.fit(*args, **kwargs)`; `fit` takes the model first."""
        return fit(model, *args, **kwargs)

    def arrange_callbacks(self, callback_list: Any, model: Any) -> None:
        """Called when Keras gives its list of callbacks a model, which may change `callback_list.callbacks`."""

    # Files and variables.

    def save(self, model: Any, path: Any, with_optimizer: bool, write: Callable[[], Any]) -> Any:
        """Saves or exports a model by `write`, whose result is returned."""
        return write()

    def settle(self, model: Any) -> None:
        """Waits until all steps of a model that were handed out are done: what is read of it then belongs together.

        Raises:
            Exception: what a step has raised.
        """

    def initialize_variable(self, variable: Any, initialize: Callable[[], None]) -> None:
        """Makes the `tf.Variable` of a Keras variable in this strategy's scope."""
        initialize()

    # What stands in a step. These are asked of the strategy whose step is traced, or of the scope.

    def scale_loss(self, value: Any, scale: Callable[[Any], Any]) -> Any:
        """Keras' division of a loss by the number of replicas, and its reverse."""
        return scale(value)

    def apply_mask(self, sample_weight: Any, mask: Any, dtype: Any, reduction: Any, apply: Callable) -> Any:
        """`apply_mask` of `keras.src.losses.loss`."""
        return apply(sample_weight, mask, dtype, reduction)

    def reduce_values(self, values: Any, sample_weight: Any, reduction: str, reduce: Callable) -> Any:
        """`reduce_values` of `keras.src.losses.loss`."""
        return reduce(values, sample_weight, reduction)

    def weight_of_scalar(self, metric: Any, value: Any) -> Any:
        """The sample weight of a scalar that a `Mean` or `Sum` is given without one; `None` for none."""

    def sum_gradients(self, optimizer: Any, grads_and_vars: Any, add: Callable) -> Any:
        """The sums of the replicas' gradients, of which an optimizer applies its own."""
        return add(grads_and_vars)

    def apply_gradients(self, optimizer: Any, grads: Any, variables: Any, apply: Callable) -> Any:
        """`optimizer.apply(grads, variables)`."""
        return apply(grads, variables)

    def next_seed(self, generator: Any, draw: Callable[[], Any]) -> Any:
        """`generator.next()` of a Keras SeedGenerator."""
        return draw()


_without_strategy = KerasHooks()


def use_without_strategy(hooks: KerasHooks) -> None:
    """Lets models without a tfdist strategy ask these hooks."""
    global _without_strategy
    _without_strategy = hooks


def hooks_of(strategy: Any) -> KerasHooks:
    """The hooks of a strategy; those of models without one, if it is not tfdist's."""
    return strategy._keras_hooks if has_hooks(strategy) else _without_strategy


def has_hooks(strategy: Any) -> bool:
    """Whether a strategy is one of tfdist's."""
    return isinstance(getattr(strategy, "_keras_hooks", None), KerasHooks)
