"""Mode "auto": chooses the modes of a model's blocks when a fit tells how large its batches are."""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import PerReplicaSpec
from tfdist.inspection import epoch_iterators
from tfdist.memory.estimation.batch import map_rows, specifications_of
from tfdist.memory.estimation.choosing import choose_for
from tfdist.memory.estimation.validation import check_estimable
from tfdist.memory.modes import apply_modes
from tfdist.memory.policy import MemoryPolicy

_log = logging.getLogger("tfdist")
# The methods of a model that are replaced.
METHODS = ("_maybe_symbolic_build", "make_train_function")


class Automatic:
    """Replaces two methods of a model: notes the shapes of its batches, and applies a policy before a step is traced.

    Keras calls `_maybe_symbolic_build` with the data of a fit, and then `make_train_function`, which traces the step.

    Attributes:
        policy: the policy, with mode "auto" and a budget.
    """

    def __init__(self, model: keras.Model, policy: MemoryPolicy):
        self.policy, self._model = policy, model
        self._batch: Any = None
        self._chosen_for: Any = None

    def note(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Notes a batch, as Keras gives it to `_maybe_symbolic_build`."""
        if iterator is not None:
            rows = epoch_iterators.batch_size(iterator)
            specs = epoch_iterators.batch_specification(iterator)
            # A dataset that the user has distributed yields one batch for each replica.
            dataset = iterator._distributed_dataset
            each = tf.nest.flatten(getattr(dataset, "source", dataset).element_spec)
            replicas = self._model.distribute_strategy.num_replicas_in_sync
            times = replicas if any(isinstance(spec, PerReplicaSpec) for spec in each) else 1
            # What is no tensor has no known shape: `_choose` refuses it.
            specs = tf.nest.map_structure(lambda spec: tf.TensorSpec(None) if spec is None else spec, specs)
            self._batch = map_rows(specs, lambda first: rows if first is None else first * times)
        elif data_batch is not None:
            # Keras gives `None` where there are no targets or weights.
            parts = tuple(data_batch)
            while parts and parts[-1] is None:
                parts = parts[:-1]
            self._batch = specifications_of(parts)

    def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> None:
        self.note(iterator, data_batch)
        type(self._model)._maybe_symbolic_build(self._model, iterator=iterator, data_batch=data_batch)

    def make_train_function(self, force: bool = False) -> Any:
        """Chooses and applies the modes, if batches have changed; then does what Keras does."""
        # `compile` removes the train function. Then it is chosen anew: another optimizer has other slots.
        changed = self._chosen_for != str(self._batch) or self._model.train_function is None
        if self._batch is not None and (changed or force):
            self._choose()
        return type(self._model).make_train_function(self._model, force)

    def _choose(self) -> None:
        check_estimable(self._model, "MemoryPolicy('auto')")
        if not all(spec is None or spec.shape.is_fully_defined() for spec in tf.nest.flatten(self._batch)):
            raise ValueError(
                f"Received: mode 'auto' for model '{self._model.name}', and batches whose shapes are not all known: "
                f"{self._batch}. Expected: batches of one size, such as dataset.batch(n, drop_remainder=True); or, for "
                "generators, too, choice = tfdist.memory.choose(model, data=(x, y), policy=...) with the largest batch "
                "that comes, and tfdist.memory.apply(model, choice.policy)."
            )
        choice = choose_for(self._model, self._batch, self.policy)
        apply_modes(self._model, choice.policy)
        self._chosen_for = str(self._batch)
        if any(option.mode != "none" for option in choice.options):
            _log.warning("Model '%s': %s", self._model.name, choice)
        else:
            _log.info("Model '%s': %s", self._model.name, choice.summary)
