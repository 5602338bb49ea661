"""`PipelineStrategy.summary`, on models whose numbers one can count."""

from __future__ import annotations

import keras
import numpy as np

import tfdist
from tests.models import ready


def summarized(names: list[str], width: int, rows: int | None = None, **options) -> list[str]:
    """The summary of Dense layers of 4 units, which have 20 parameters, 80 bytes, and 16 bytes a row each."""
    strategy = tfdist.PipelineStrategy(num_microbatches=8, **options)
    with strategy.scope():
        layers = [keras.layers.Dense(4, name=name) for name in names]
        model = ready(keras.Sequential([keras.Input((4,)), *layers]), "sgd", "mse")
    if rows:
        model.fit(np.ones((rows, 4)), np.ones((rows, 4)), batch_size=rows, verbose=0)
    return strategy.summary(model, width).splitlines()


def test_two_stages_in_a_narrow_terminal():
    names = ["block_first", "block_second", "block_third", "block_last"]
    assert summarized(names, 80, 32, devices=["CPU:0"] * 2, cuts=["block_second"]) == [
        " Stage  Device         Layers         Calls  Parameters   Size  FLOPs  Sent/row",
        " " + "─" * 78,
        "     0  /device:CPU:0  block_first …      2          40  160 B  50.0%      16 B",
        "                       block_second",
        "     1  /device:CPU:0  block_third …      2          40  160 B  50.0%         -",
        "                       block_last",
        "",
        "                                          4          80  320 B",
        "",
        "Schedule: 1f1b, 8 micro-batches of 4 rows",
        "Bubble: 11.1% = (K - 1) / (M + K - 1), K = 2 devices, M = 8",
        "Predicted speed-up: 1.78 x one device (at most 2)",
        "Effective batch: 8 micro-batches x 4 rows = 32 rows per step",
    ]


def test_chunks_and_replicas():
    lines = summarized(list("abcd"), 120, schedule="interleaved", devices=["CPU:0"] * 4, replicas=2)
    assert [line.split()[:3] for line in lines[2:6]] == [[str(i), "/device:CPU:0", "abcd"[i]] for i in range(4)]
    assert lines[-4:] == [
        "Schedule: interleaved, 8 micro-batches",
        "Bubble: 5.9% = (K - 1) / (V M + K - 1), K = 2 devices, M = 8, V = 2 chunks",
        "Predicted speed-up: 3.76 x one device (at most 4)",  # 4 x 16 / 17
        "Effective batch: the batch of fit, in 2 replicas x 8 micro-batches",
    ]


def test_gradients_of_weights_in_the_bubble():
    lines = summarized(list("abcd"), 120, schedule="zb-h1", devices=["CPU:0"] * 4)
    assert lines[-4:-1] == [
        "Schedule: zb-h1, 8 micro-batches",
        "Bubble: 11.1% = (K - 1) / (3 M + K - 1), K = 4 devices, M = 8",
        "Predicted speed-up: 3.56 x one device (at most 4)",  # 4 x 24 / 27
    ]


def test_long_names_stay_in_the_width():
    lines = summarized(["a_" * 60 + "b", "last"], 100, devices=["CPU:0"])
    assert max(map(len, lines)) <= 100
    assert any("last" in line for line in lines)
