"""What the gathers of a step wait for, read from its graph: the end of which blocks."""

from __future__ import annotations

import collections
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tfdist.memory import kinds
from tfdist.memory.block import upstream

WIDTH = 64


def blocks_ahead(strategy: tf.distribute.Strategy, regularizer: str | None = None) -> dict[str, set[int]]:
    """For how many blocks, whose computation may not have ended yet, the gathers of a fit's step need not wait.

    Args:
        strategy: a `FullyShardedStrategy` that gathers twice.
        regularizer: of the kernels, each of which is then gathered for the loss as if it were a block behind the last.

    Returns:
        The numbers that gathers of the forward pass, and of the backward pass, have.
    """
    forward, backward, gathers = ({} for _ in range(3))
    gathered, run_forward, run_backward = kinds.Gathered.gathered, kinds.Gathered.forward, kinds.Gathered.backward

    def ops(values: Any) -> list[tf.Operation]:
        return [value.op for value in tf.nest.flatten(values) if value is not None]

    def note_gather(self: kinds.Gathered, gate: Any) -> Any:
        whole = gathered(self, gate)
        gathers.setdefault(self.keeping.order, collections.defaultdict(list))[self.place].append(ops(whole))
        return whole

    def note_forward(self: kinds.Gathered) -> Any:
        result = run_forward(self)
        forward.setdefault(self.keeping.order, {})[self.place] = set(ops(result.result))
        return result

    def note_backward(self: kinds.Gathered, cotangents: Any) -> Any:
        gradients = run_backward(self, cotangents)
        of_inputs = gradients[len(self.trainable) :]
        backward.setdefault(self.keeping.order, {})[self.place] = set(ops(of_inputs))
        return gradients

    noting = {"gathered": note_gather, "forward": note_forward, "backward": note_backward}
    with mock.patch.multiple(kinds.Gathered, **noting), strategy.scope():
        layers = [keras.layers.Dense(WIDTH, "tanh", kernel_regularizer=regularizer) for _ in range(6)]
        model = keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(WIDTH)])
        model.compile("sgd", "mse")
        model.fit(np.ones((8, WIDTH)), np.ones((8, WIDTH)), batch_size=8, verbose=0)

    def needed(operations: list[tf.Operation]) -> set[tf.Operation]:
        # The graph is finished: TensorFlow has added what keeps exchanges in their order.
        return upstream(operations, lambda op: [*(tensor.op for tensor in op.inputs), *op.control_inputs])

    found: dict[str, set[int]] = {"forward": set(), "backward": set()}
    for order, of_blocks in gathers.items():
        for place, (first, *again) in of_blocks.items():
            before = needed(first)
            ended = [other for other, end in forward[order].items() if end & before]
            found["forward"] |= {place - 1 - max(ended)} if ended else set()
            before = needed(again[0]) if again else set()
            ended = [other for other, end in backward[order].items() if end & before]
            found["backward"] |= {min(ended) - 1 - place} if ended else set()
    return found
