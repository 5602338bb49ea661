"""The hooks of models without a tfdist strategy, and what the hooks of all strategies have in common.

`tfdist.strategies.keras_hooks` has what is different under a strategy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from tfdist import compat
from tfdist.compat.hooks import KerasHooks
from tfdist.compat.scopes import outside_of_scope
from tfdist.inspection import epoch_iterators, global_seeds
from tfdist.runtime import chief_only
from tfdist.runtime.callback_order import Arranged
from tfdist.runtime.progress_callback import add_reporter
from tfdist.runtime.remote_paths import add_path_check, check_paths
from tfdist.steps import custom_loops, step_reductions, validation
from tfdist.steps.keras_step import current_step
from tfdist.steps.step_overrides import seed_of_replica
from tfdist.supervision.time_spent import time_spent


def install() -> None:
    """Installs tfdist's patches of Keras and TensorFlow, once; called by whatever needs them, never at import."""
    compat.install(_common)


class CommonHooks(KerasHooks):
    """Models without a tfdist strategy, and what is the same under all strategies."""

    def make_epoch_iterator(self, iterator: Any, arguments: Mapping[str, Any], make: Callable[..., None]) -> None:
        validation.warn_without_scope()
        make(**arguments)

    def build(self, model: Any, iterator: Any, data_batch: Any, build: Callable[[], None]) -> None:
        if not self._is_new(model, iterator):
            return
        validation.warn_without_scope()
        validation.check_without_strategy(model)
        build()
        note(model)

    def _is_new(self, model: Any, iterator: Any) -> bool:
        """Whether a model has to be checked and built; `*_on_batch` comes here with each batch."""
        if iterator is not None:
            epoch_iterators.note(model, iterator)
        elif is_known(model):
            return False
        validation.check_optimizers(model)
        return True

    def fit(self, model: Any, args: tuple, kwargs: dict, fit: Callable) -> Any:
        try:
            return super().fit(model, args, kwargs, fit)
        finally:
            time_spent().fit_ends()  # a program may go on after an exception

    def arrange_callbacks(self, callback_list: Any, model: Any) -> None:
        strategy = getattr(model, "_distribute_strategy", None)
        callbacks = chief_only.replaced(callback_list, callback_list.callbacks, strategy)
        validation.check_callbacks(callbacks)
        check_paths(callbacks)
        callbacks = self._arrange(callback_list, callbacks, model)
        for callback in list(callbacks):
            if isinstance(callback, Arranged):
                callbacks = callback._arrange(callback_list, callbacks)
        add_path_check(callbacks, model)
        add_reporter(callbacks, model)
        callback_list.callbacks = callbacks

    def _arrange(self, callback_list: Any, callbacks: list, model: Any) -> list:
        return callbacks

    def scale_loss(self, value: Any, scale: Callable[[Any], Any]) -> Any:
        return scale(value) if current_step() is None else value

    def apply_mask(self, sample_weight: Any, mask: Any, dtype: Any, reduction: Any, apply: Callable) -> Any:
        step = current_step()
        if step is None:
            return apply(sample_weight, mask, dtype, reduction)
        return step_reductions.apply_mask(step, sample_weight, mask, dtype, reduction, apply)

    def reduce_values(self, values: Any, sample_weight: Any, reduction: str, reduce: Callable) -> Any:
        step = current_step()
        if step is None:
            return reduce(values, sample_weight, reduction)
        return step_reductions.reduce_values(step, values, sample_weight, reduction, reduce)

    def weight_of_scalar(self, metric: Any, value: Any) -> Any:
        step = current_step()
        return None if step is None else step_reductions.weight_of_scalar(step, metric, value)

    def sum_gradients(self, optimizer: Any, grads_and_vars: Any, add: Callable) -> Any:
        # The optimizers of a model that were found have another `apply` in a step, see step_overrides.py.
        if current_step() is not None:
            raise RuntimeError(
                f"Received: optimizer '{optimizer.name}', used in a train_step, which is not an attribute of the model "
                "or of one of its layers. Expected: `self.my_optimizer = ...` on the model (in a list or dict, too), "
                "so that tfdist can give it the gradient of the global batch."
            )
        return list(grads_and_vars) if custom_loops.are_summed() else add(grads_and_vars)

    def apply_gradients(self, optimizer: Any, grads: Any, variables: Any, apply: Callable) -> Any:
        return custom_loops.apply_gradients(optimizer, grads, variables, apply)

    def next_seed(self, generator: Any, draw: Callable[[], Any]) -> Any:
        generator.is_used = True
        if tf.distribute.in_cross_replica_context() and not global_seeds.is_here(generator):
            # `keras.random` without a seed, in the scope of another strategy than that of the last model.
            with outside_of_scope():
                return draw()
        seed = draw()
        step = current_step()
        # In training and test steps the replicas' seeds differ already, see step_overrides.py.
        is_alike = step.kind == "predict" if step is not None else custom_loops.strategy_of_custom_loop() is not None
        return seed_of_replica(seed) if is_alike else seed


_common = CommonHooks()


# Which models were checked and built as they are: `train_on_batch` would look at all attributes of all layers again.
#
# What is compiled for a model does not become another before `compile` is called, which throws it away.

# Weak on both sides: the functions of a model hold it.
_known: weakref.WeakKeyDictionary[Any, tuple] = weakref.WeakKeyDictionary()


def is_known(model: Any) -> bool:
    """Whether a model has the functions of steps, and the optimizer, that `note` was told of."""
    noted = _known.get(model)
    return noted is not None and all(
        (reference is not None and reference() is part) or reference is part is None
        for reference, part in zip(noted, _parts(model), strict=True)
    )


def note(model: Any) -> None:
    """Notes a model that was checked and built; one that has compiled nothing yet is looked at once more."""
    parts = _parts(model)
    if parts[:2] != (None, None):
        _known[model] = tuple(None if part is None else weakref.ref(part) for part in parts)


def _parts(model: Any) -> tuple:
    return model.train_function, model.test_function, model.optimizer
