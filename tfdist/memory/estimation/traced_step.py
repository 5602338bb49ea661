"""The graph of a training step, traced for a batch that is never computed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute.distribute_lib import _DefaultDistributionStrategy

from tfdist.memory.estimation.batch import symbolic
from tfdist.memory.estimation.traced_graph import VIEWS, short_device
from tfdist.memory.labels import GRADIENT, label_of, recorded, scopes_of
from tfdist.strategies.keras_step import shadowed
from tfdist.strategies.model_parts import parts_of

GRADIENTS, OPTIMIZER, OTHER = "gradients of weights", "optimizer", "loss and metrics"


@dataclasses.dataclass(frozen=True)
class TracedStep:
    """A training step of a model.

    Attributes:
        graph: its operations.
        forward: names of the operations of the forward pass, and of those that run it again, with their blocks.
        labels: what operations make, by their names: blocks, `GRADIENTS`, `OPTIMIZER` or `OTHER`.
    """

    graph: tf.Graph
    forward: Mapping[str, str]
    labels: Mapping[str, str]


def trace_step(model: keras.Model, batch: Any) -> TracedStep:
    """Traces a training step; variables stay as they are.

    Args:
        model: a compiled model.
        batch: `tf.TensorSpec`s as `train_step` takes them on one replica: `(x, y)` or `(x, y, sample_weight)`.
    """
    strategy = model.distribute_strategy
    replicas = len(compute_devices(model))
    # Keras makes the optimizer's variables, and those of metrics, in the first step otherwise.
    built_from = symbolic(batch)
    with strategy.scope():
        # With a strategy it also does what the strategy does before a fit. The class's own: this is no batch of a fit.
        type(model)._maybe_symbolic_build(model, data_batch=built_from)
        if model._distribute_strategy is None:
            model._symbolic_build(data_batch=built_from)
    applied: list[tf.Tensor] = []

    @tf.autograph.experimental.do_not_convert
    def step(*batches: Any) -> Any:
        several = strategy.num_replicas_in_sync > 1
        data = distribute_utils.regroup(batches, always_wrap=True) if several else batches[0]
        return strategy.run(model.train_step, args=(data,))

    with recorded() as blocks, contextlib.ExitStack() as stack:
        for part in [model.optimizer, *parts_of(model.optimizer)]:
            stack.enter_context(_noted_gradients(part, applied))
        graph = tf.function(step, autograph=False).get_concrete_function(*[batch] * replicas).graph
    gradients = _gradient_operations([_through_views(tensor) for tensor in applied], blocks)
    scopes = scopes_of(blocks)

    def label(operation: tf.Operation) -> str:
        if operation.name in gradients:
            return GRADIENTS
        rest = OPTIMIZER if model.optimizer.name in operation.name.split("/") else OTHER
        return label_of(operation.name, blocks, scopes) or rest

    return TracedStep(graph, blocks, {op.name: label(op) for op in graph.get_operations()})


def compute_devices(model: keras.Model) -> list[str]:
    """The devices of this process that compute a model's steps."""
    strategy = model.distribute_strategy
    # What TensorFlow has for models that were made outside of any scope.
    if isinstance(strategy, _DefaultDistributionStrategy):
        return ["GPU:0" if tf.config.list_logical_devices("GPU") else "CPU:0"]
    return [short_device(device) for device in strategy.extended.worker_devices]


@contextlib.contextmanager
def _noted_gradients(optimizer: keras.Optimizer, noted: list[tf.Tensor]) -> Iterator[None]:
    """Notes what an optimizer updates weights with."""
    update = optimizer._backend_apply_gradients

    def noting(gradients: Any, variables: Any) -> None:
        noted.extend(tf.nest.flatten(list(gradients), expand_composites=True))
        update(gradients, variables)

    with shadowed(optimizer, _backend_apply_gradients=noting):
        yield


def _gradient_operations(applied: Sequence[tf.Tensor], blocks: Mapping[str, str]) -> set[str]:
    """Names of the operations that make what an optimizer gets, back to where it was computed.

    On the way it may be scaled, clipped, packed and reduced.
    """
    found: set[str] = set()
    waiting = [tensor.op for tensor in applied]
    while waiting:
        operation = waiting.pop()
        if operation.name in found:
            continue
        found.add(operation.name)
        if operation.name not in blocks and GRADIENT not in operation.name:
            waiting += [tensor.op for tensor in operation.inputs]
    return found


def _through_views(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor shows."""
    while tensor.op.type in VIEWS and tensor.op.inputs:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor
