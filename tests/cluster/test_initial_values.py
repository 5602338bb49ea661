"""Variables of every dtype begin with the chief's value on all processes, whatever their own was."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

DTYPES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
]


def each(kind: str) -> dict[str, Any]:
    """In each process: values of variables, and what a quantized model with LoRA trains."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfdist

    strategy = getattr(tfdist, kind)(start_timeout=60, peer_timeout=60)
    own = 1 - strategy._peers.rank  # the chief has 1
    found = {}
    for dtype in DTYPES:
        with strategy.scope():
            variable = tf.Variable(tf.cast([[own, 1]], dtype))
        assert variable.dtype == dtype
        found[dtype] = np.asarray(tf.cast(variable, "complex128")).real.tolist()
    keras.utils.set_random_seed(1 + own)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        model.quantize("int8")
        model.layers[0].enable_lora(2)
        model.compile("sgd", "mse")
    rows = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
    found["loss"] = model.fit(rows, rows[:, :1], batch_size=8, epochs=2, verbose=0).history["loss"]
    found["weights"] = [np.asarray(w, "float64").tolist() for w in model.get_weights()]
    return found


@functools.cache
def on_two(kind: str) -> list[dict[str, Any]]:
    if kind == "HorovodStrategy":
        pytest.importorskip("horovod.tensorflow")
    return run_local(each, workers=2, timeout=120, args=(kind,))


@pytest.mark.parametrize(
    "kind", daily(["MultiWorkerMirroredStrategy", "HorovodStrategy"], "MultiWorkerMirroredStrategy")
)
def test_all_begin_with_the_value_of_the_chief(kind):
    for found in on_two(kind):
        assert [found[dtype] for dtype in DTYPES] == [[[1.0, 1.0]]] * len(DTYPES)


@pytest.mark.parametrize(
    "kind", daily(["MultiWorkerMirroredStrategy", "HorovodStrategy"], "MultiWorkerMirroredStrategy")
)
def test_a_quantized_model_with_lora_trains(kind):
    first, second = on_two(kind)
    assert first["weights"] == second["weights"]
    assert first["loss"][1] < first["loss"][0]
