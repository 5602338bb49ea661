"""Applies a memory policy to a model, and takes it back.

Mode "auto" chooses the modes of a model's blocks when a fit tells how large its batches are.
"""

from __future__ import annotations

import logging
from typing import Any

import keras
import tensorflow as tf

from tfdist.compat.upstream import PerReplicaSpec
from tfdist.inspection.datasets import batch_size, batch_specification
from tfdist.memory.budget import choose_for
from tfdist.memory.estimate import check_estimable, map_rows, specifications_of
from tfdist.memory.modes import apply_modes, automatic_of, check_not_streamed, plan_of, remove_modes
from tfdist.memory.policy import MemoryPolicy, policy_of

_log = logging.getLogger("tfdist")
# The methods of a model that mode "auto" replaces.
_METHODS = ("_maybe_symbolic_build", "make_train_function")


def apply(model: keras.Model, policy: MemoryPolicy | str) -> keras.Model:
    """Lets a model keep less for its backward pass; what it computes stays the same, bit for bit.

    The model's layers, weights, files and configuration do not change; `fit`, `train_on_batch`, custom train steps and
    loops with a `tf.GradientTape` take part. It works before `compile` and after it, under any strategy that runs the
    model's own `call`: `PipelineStrategy` does not, and has `memory=` of its own. A model that gets other layers, by
    `Sequential.add` say, keeps everything until it is applied again. Mode "auto" chooses in `fit` and
    `train_on_batch`, which know how large batches are; until then everything is kept.

    Args:
        model: a model that is built: by `keras.Input`, by `build`, or by being called once.
        policy: what is kept; a mode stands for a policy with this mode and nothing else.

    Returns:
        The model.

    Raises:
        ValueError: if the model is not built, the policy names blocks that there are not, or no blocks are found.

    Example:
        >>> import keras, tfdist
        >>> model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, "relu") for _ in range(9))])
        >>> model.compile("sgd", "mse")
        >>> model = tfdist.memory.apply(model, "recompute")
    """
    policy = policy_of(policy)
    if policy is None:
        raise ValueError("Received: policy=None. Expected: a mode, or a MemoryPolicy; `remove` takes a policy back.")
    _check(model, policy)
    # Mistakes are reported before anything is changed, also those that would show in a fit only.
    plan_of(model, policy.with_modes("none") if policy.is_automatic else policy)
    remove(model)
    if policy.is_automatic:
        automatic = Automatic(model, policy)
        for name in _METHODS:
            object.__setattr__(model, name, getattr(automatic, name))
    else:
        apply_modes(model, policy)
    return model


def _check(model: keras.Model, policy: MemoryPolicy) -> None:
    """Refuses a model that is not built, has a policy of its strategy's, or is trained without the graph of a step."""
    if not isinstance(model, keras.Model):
        raise ValueError(f"Received: model={model!r}. Expected: a keras.Model, as the first argument.")
    if not model.built:
        raise ValueError(
            f"Received: model '{model.name}', which is not built, so that its layers are not known. Expected: a model "
            "with a keras.Input, or one on which `model.build(input_shape)` was called, or which was called once."
        )
    if not policy.streams:
        check_not_streamed(model)
    if model.compiled and model.run_eagerly and {"auto", "swap"} & set(policy.modes):
        raise ValueError(
            f"Received: mode 'auto' or 'swap', which needs the graph of a step, for model '{model.name}', which was "
            "compiled with run_eagerly=True. Expected: run_eagerly=False; or mode 'recompute' or 'recompute+swap'."
        )
    specs = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    known = sorted({f"{spec.device_type}:{spec.device_index}" for spec in specs})
    # A device of another process (it names a job) is known to that process only.
    if "job:" not in policy.host and policy.host.upper().rpartition("/")[2].removeprefix("DEVICE:") not in known:
        raise ValueError(f"Received: host={policy.host!r}. Expected: a device of this process: {', '.join(known)}.")


def remove(model: keras.Model) -> keras.Model:
    """Lets a model keep everything again.

    Args:
        model: any model.

    Returns:
        The model.
    """
    if automatic_of(model) is not None:
        for name in _METHODS:
            object.__delattr__(model, name)
    remove_modes(model)
    return model


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

    def note_data(self, iterator: Any = None, data_batch: Any = None) -> None:
        """Notes a batch, as Keras gives it to `_maybe_symbolic_build`."""
        if iterator is not None:
            rows = batch_size(iterator)
            specs = batch_specification(iterator)
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
        self.note_data(iterator, data_batch)
        type(self._model)._maybe_symbolic_build(self._model, iterator=iterator, data_batch=data_batch)

    def make_train_function(self, force: bool = False) -> Any:
        """Chooses and applies the modes, if batches have changed; then does what Keras does."""
        # `compile` removes the train function. Then it is chosen again: another optimizer has other slots.
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
        if choice.added:
            _log.warning("Model '%s': %s", self._model.name, choice)
        else:
            _log.info("Model '%s': %s", self._model.name, choice.summary)
