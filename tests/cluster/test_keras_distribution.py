"""`keras.distribution` on two processes: equal to one process, where weights are, what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tfdist.cluster.ports import reserve
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def refusal(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "not refused"


def place_of(distribution: Any) -> tuple[int, int]:
    """The number of processes, and which one this is; before Keras 3.15 no property says the first."""
    return getattr(distribution, "num_processes", None) or distribution._num_process, distribution._process_id


def trained() -> dict[str, Any]:
    """Trains as scripts for JAX do. Runs on every process."""
    import keras
    import numpy as np
    import tensorflow as tf
    from keras import distribution as kd

    import tfdist
    from tfdist.compat.upstream import context
    from tfdist.testing import assert_transparent

    keras.config.set_floatx("float64")
    tfdist.keras_distribution.enable()
    found: dict[str, Any] = {
        "without initialize": refusal(lambda: kd.set_distribution(kd.DataParallel(devices=["cpu:0"])))
    }
    kd.initialize()
    x, y = np.random.default_rng(1).normal(size=(21, 5)), np.random.default_rng(2).normal(size=(21, 2))

    def deep() -> keras.Model:
        layers = [keras.layers.Dense(16, "tanh", name=f"dense_{i}") for i in range(3)]
        model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(2, name="last")], name="deep")
        model.compile(keras.optimizers.SGD(0.1, momentum=0.5, global_clipnorm=0.1), "mse")
        return model

    class Scope:
        num_replicas_in_sync = 4

        def __init__(self, distribution: Any) -> None:
            self.scope = distribution.scope

    whole = kd.DataParallel()
    found["devices"] = kd.list_devices(), whole.device_mesh.shape
    found["process"] = place_of(whole)
    found["shard of data"] = getattr(whole, "data_shard_id", whole._process_id)

    def batches() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)

    assert_transparent(Scope(whole), deep, batches, epochs=1, tolerance=1e-12)
    layout_map = kd.LayoutMap(kd.DeviceMesh((2, 2), ("batch", "model")))
    layout_map["deep/dense_[12]/kernel"] = (None, "model")
    parts = kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    kd.set_distribution(whole)
    keras.utils.set_random_seed(5)
    with parts.scope():
        found["seed"] = context.global_seed()
        strategy = tf.distribute.get_strategy()
        model = deep()
    found["strategies"] = type(tf.distribute.get_strategy()).__name__, type(strategy).__name__
    kd.set_distribution(None)
    assert_transparent(Scope(parts), deep, (x, y), batch_size=8, epochs=1, tolerance=1e-12)
    found["kept"] = {v.path: [part.shape.num_elements() for part in v.value._values] for v in model.trainable_weights}
    found["own data"] = refusal(lambda: kd.set_distribution(kd.DataParallel(auto_shard_dataset=False)))
    with whole.scope():
        whole.auto_shard_dataset = False
        found["own data, later"] = refusal(lambda: deep().fit(x, y, verbose=0))
    found["some devices"] = refusal(lambda: kd.set_distribution(kd.DataParallel(devices=["cpu:0"])))
    found["another number"] = refusal(lambda: kd.initialize(num_processes=3))
    return found


# tests/logical/test_keras_distribution.py does so on two devices.
@pytest.mark.nightly
def test_equals_one_process() -> None:
    everyone = [f"cpu:{i}" for i in range(4)]
    for rank, found in enumerate(run_local(trained, workers=2, devices_per_worker=2, timeout=280)):
        assert f"one process of several (worker {rank}" in found["without initialize"]
        assert found["devices"] == (everyone, (4,))
        assert found["process"] == (2, rank)
        assert found["shard of data"] == rank
        assert found["seed"] == 5
        assert found["strategies"] == ("MultiWorkerMirroredStrategy", "FullyShardedStrategy")
        names = ("dense_0", "dense_1", "dense_2")
        assert {path: sizes for path, sizes in found["kept"].items() if path.split("/")[1] in names} == {
            "deep/dense_0/kernel": [80, 80],
            "deep/dense_1/kernel": [64, 64],  # a quarter
            "deep/dense_2/kernel": [64, 64],
            **{f"deep/{name}/bias": [16, 16] for name in names},
        }
        for case in ("own data", "own data, later"):
            assert "auto_shard_dataset=False" in found[case]
        assert "a mesh of cpu:0. Expected: all devices, each once: cpu:0, cpu:1" in found["some devices"]
        assert f"num_processes=3 and process_id=None. Expected: 2 and {rank}" in found["another number"]


def described(addresses: str) -> dict[str, Any]:
    """Runs on every process, which knows of the others what Keras' variables say."""
    from keras import distribution as kd

    import tfdist

    rank = tfdist.discover().rank
    for name in [name for name in os.environ if name.startswith("TFDIST_CLUSTER")]:
        del os.environ[name]
    os.environ |= {
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": addresses,
        "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_PROCESS_ID": str(rank),
    }
    tfdist.keras_distribution.enable()
    kd.initialize()
    kd.set_distribution(kd.DataParallel())
    return {"process": place_of(kd.distribution()), "rank": rank}


@pytest.mark.parametrize("given", [2, pytest.param(1, marks=pytest.mark.nightly)], ids=["all", "the first one"])
def test_addresses_in_keras_variables(given: int) -> None:
    with reserve(2) as kept:
        addresses = ",".join(f"127.0.0.1:{port}" for port in kept.ports[:given])
        results = run_local(described, workers=2, timeout=120, args=(addresses,))
    for rank, found in enumerate(results):
        assert found == {"process": (2, rank), "rank": rank}
