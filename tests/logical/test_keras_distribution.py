"""`keras.distribution` on the four devices of one process: equal to one process, where weights are, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import distribution as kd

import tfdist
from tests.models import warned
from tests.tiers import daily
from tfdist.inspection.model_state import is_sharded, parts_of_variable
from tfdist.optimizers import in_parts
from tfdist.testing import assert_transparent

DATA = np.random.default_rng(1).normal(size=(42, 5)), np.random.default_rng(2).normal(size=(42, 2))
# The last one of the blocks, and one weight of the head, stay whole.
SHARDED = {r"dense_[01]/kernel": (None, "model"), r"dense_1/bias": ("model",), "head/bias": ("batch",)}


@pytest.fixture(autouse=True)
def enabled(four_devices: list[str]) -> Iterator[None]:
    tfdist.keras_distribution.enable()
    yield
    kd.set_distribution(None)


def deep(optimizer: Callable[[], Any] = lambda: "adam") -> keras.Model:
    inputs = x = keras.Input((5,))
    for i in range(3):
        x = keras.layers.Dense(32, "tanh", name=f"dense_{i}")(x)
    x = keras.layers.BatchNormalization(name="normalization")(x)
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(x))
    model.compile(optimizer(), "mse", metrics=["mae"])
    return model


def split(layouts: dict[str, tuple] | None = None, shape: tuple[int, int] = (2, 2)) -> kd.ModelParallel:
    layout_map = kd.LayoutMap(kd.DeviceMesh(shape, ("batch", "model")))
    for key, axes in (SHARDED if layouts is None else layouts).items():
        layout_map[key] = axes
    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def assert_equals_one_process(distribution: Any, make: Callable[[], keras.Model]) -> None:
    scope = SimpleNamespace(scope=distribution.scope, num_replicas_in_sync=4)
    assert assert_transparent(scope, make, DATA, batch_size=16, tolerance=1e-12)


OPTIMIZERS = {
    "adam": lambda: "adam",
    "a global norm": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.05),
    "a norm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.03),
    "averages": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2, global_clipnorm=0.05),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Lion(0.01, global_clipnorm=0.05)),
}


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("name", daily(OPTIMIZERS, "a global norm"))
def test_model_parallel_equals_one_process(name: str) -> None:
    """Also where an optimizer has weights of which replicas have parts, and others of which they have all."""
    assert_equals_one_process(split(), lambda: deep(OPTIMIZERS[name]))


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], None])
def test_data_parallel_equals_one_process(devices: list[str] | None) -> None:
    distribution = kd.DataParallel(devices=devices)
    assert_equals_one_process(distribution, deep)
    with distribution.scope():
        assert isinstance(tf.distribute.get_strategy(), tfdist.MirroredStrategy)
        assert tf.distribute.get_strategy().num_replicas_in_sync == len(devices or [0] * 4)


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
def test_a_mistake_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica adds the gradients of whole weights to the norm, which is then too large."""
    monkeypatch.setattr(in_parts, "global_replica", lambda: 0)
    with pytest.raises(AssertionError, match="does not equal one process"):
        assert_equals_one_process(split(), lambda: deep(OPTIMIZERS["a global norm"]))


@pytest.mark.nightly
def test_weights_and_their_slots_are_where_the_map_puts_them() -> None:
    with split().scope():
        model = deep()
    model.fit(*DATA, batch_size=16, verbose=0)
    kept = {v.path: [4 * part.shape.num_elements() for part in parts_of_variable(v)] for v in model.weights}
    expected = {v.path: [4 * v.shape.num_elements()] * 4 for v in model.weights}
    # Of 32 x 32 float32, and of 5 x 32, a quarter; of a bias of 2, a row of 64 bytes.
    expected |= {"dense_0/kernel": [192] * 4, "dense_1/kernel": [1024] * 4}
    expected |= {"dense_1/bias": [64] * 4, "head/bias": [64] * 4}
    assert kept == expected
    slots = {v.path.partition("/")[2]: is_sharded(v) for v in model.optimizer.variables if v.shape.rank}
    weights = {v.path.replace("/", "_"): is_sharded(v) for v in model.trainable_weights}
    assert slots == {f"{path}_{slot}": there for path, there in weights.items() for slot in ("momentum", "velocity")}


@pytest.mark.parametrize(("shape", "sharded"), [((1, 4), True), ((4, 1), False)])
def test_an_axis_of_one_device_shards_nothing(shape: tuple[int, int], sharded: bool) -> None:
    with split({".*kernel": (None, "model")}, shape).scope():
        layer = keras.layers.Dense(3)
        layer.build((None, 5))
    assert is_sharded(layer.kernel) == sharded
    assert not is_sharded(layer.bias)


class Nested(keras.Model):
    """Makes its weights when it is trained, in a scope of names that is left before they get their values."""

    def __init__(self) -> None:
        super().__init__(name="nested")
        self.inner = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(2, name="last")], name="inner")

    def call(self, x: Any) -> Any:
        return self.inner(x)


def test_the_map_is_asked_with_the_paths_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    find = kd.LayoutMap.__getitem__
    monkeypatch.setattr(kd.LayoutMap, "__getitem__", lambda self, key: asked.append(key) or find(self, key))
    with split({"nested/inner/last/(kernel|bias)": ("model",)}).scope():
        model = Nested()
        model.compile("adam", "mse")
    model.fit(*DATA, batch_size=16, verbose=0)
    paths = [v.path for v in model.trainable_weights]
    assert paths[2:] == ["nested/inner/last/kernel", "nested/inner/last/bias"]
    assert [path for path in asked if path in paths] == paths
    assert [is_sharded(v) for v in model.trainable_weights] == [False, False, True, True]


def test_the_layout_of_a_variable_itself_counts() -> None:
    distribution = split({})
    with distribution.scope():
        variable = keras.Variable(np.ones((8, 8)), layout=kd.TensorLayout(("model", None), distribution.device_mesh))
    if not hasattr(variable, "_layout"):
        pytest.skip("this Keras has no layouts of variables")
    assert is_sharded(variable)


def test_a_weight_that_cannot_be_split_is_warned_of() -> None:
    def make() -> None:
        with split({".*moving_mean": ("model",)}).scope():
            deep()

    (text,) = warned(make, "keeps all of it")
    assert "layout ('model',) for 'normalization/moving_mean', which was created with trainable=False" in text


SIZES = {"vocabulary_size": 16, "num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 2, "hidden_dim": 8}
EXPERTS = {"moe_intermediate_dim": 8, "num_experts": 2, "top_k": 1}
BACKBONES = {
    "LlamaBackbone": {},
    "GemmaBackbone": {"head_dim": 4},
    "QwenBackbone": {},
    "QwenMoeBackbone": {**EXPERTS, "shared_expert_intermediate_dim": 8},
    "Qwen3MoeBackbone": {**EXPERTS, "head_dim": 4},
}


def backbone(name: str) -> tuple[kd.ModelParallel, Callable[[], keras.Model]]:
    kind = getattr(pytest.importorskip("keras_hub", reason="needs the extra `lora`").models, name, None)
    if kind is None:
        pytest.skip(f"this KerasHub has no {name}")
    layout_map = kind.get_layout_map(kd.DeviceMesh((1, 4), ("batch", "model")))

    def make() -> keras.Model:
        made = kind(**SIZES, intermediate_dim=16, **BACKBONES[name])
        model = keras.Model(made.inputs, keras.layers.Dense(1)(made.output[:, 0]))
        model.compile(keras.optimizers.SGD(0.01), "mse")
        return model

    return kd.ModelParallel(layout_map=layout_map, batch_dim_name="batch"), make


@pytest.mark.parametrize("name", daily(BACKBONES, "LlamaBackbone"))
def test_layout_maps_of_keras_hub(name: str) -> None:
    distribution, make = backbone(name)
    with distribution.scope():
        weights = make().trainable_weights
    wanted = [distribution.get_tensor_layout(v.path) is not None for v in weights]
    assert [is_sharded(v) for v in weights] == wanted
    assert sum(wanted) >= 6


@pytest.mark.nightly
@pytest.mark.usefixtures("in_float64")
# Those with experts compute in float32 whatever the policy is, and balance the experts by a replica's own rows.
@pytest.mark.parametrize("name", [name for name in BACKBONES if "Moe" not in name])
def test_backbones_of_keras_hub_equal_one_process(name: str) -> None:
    distribution, make = backbone(name)
    tokens = np.random.default_rng(3).integers(1, 16, (8, 6))

    def data() -> tf.data.Dataset:
        inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}
        return tf.data.Dataset.from_tensor_slices((inputs, tokens[:, :1] / 16)).batch(4)

    scope = SimpleNamespace(scope=distribution.scope, num_replicas_in_sync=4)
    assert assert_transparent(scope, make, data, epochs=1, tolerance=1e-5)


@pytest.mark.nightly
def test_distributions_are_set_nested_and_taken_back() -> None:
    whole, parts = kd.DataParallel(), split()
    assert kd.distribution() is None
    kd.set_distribution(whole)
    first = tf.distribute.get_strategy()
    with parts.scope():
        assert kd.distribution() is parts
        assert isinstance(tf.distribute.get_strategy(), tfdist.FullyShardedStrategy)
        with whole.scope():
            assert tf.distribute.get_strategy() is first
        model = deep()
    assert kd.distribution() is whole
    keras.utils.clear_session()
    assert kd.distribution() is whole
    with pytest.raises(RuntimeError, match="in the scope of another MirroredStrategy"):
        model.fit(*DATA, batch_size=16, verbose=0)
    tfdist.keras_distribution.enable()
    assert tf.distribute.get_strategy() is first
    kd.set_distribution(None)
    assert kd.distribution() is None
    assert not tf.distribute.has_strategy()
    model.fit(*DATA, batch_size=16, verbose=0)  # outside of every scope
    plain = deep()
    plain.fit(*DATA, batch_size=16, verbose=0)
    assert not hasattr(plain.weights[0].value, "distribute_strategy")


def test_devices_and_processes() -> None:
    assert kd.list_devices() == kd.list_devices("CPU") == [f"cpu:{i}" for i in range(4)]
    assert kd.list_devices("gpu") == []
    if hasattr(kd, "get_device_count"):  # since Keras 3.13
        assert kd.get_device_count("cpu") == 4
    kd.initialize()  # alone
    assert kd.DataParallel()._process_id == 0


def of_activations(**layouts: tuple) -> None:
    with split({key.replace("__", "/"): axes for key, axes in layouts.items()}).scope():
        deep().fit(*DATA, verbose=0)


def in_one_of_several(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> None:
    monkeypatch.setenv("TFDIST_RANK", "1")
    monkeypatch.setenv("TFDIST_SIZE", "2")
    call()


MESH = ("batch", "model")
REFUSED: dict[str, tuple[Callable[[Any], Any], type, str]] = {
    "a layout of an activation": (
        lambda _: of_activations(dense_0__output=("batch", "model")),
        Exception,
        "a layout for a tensor in 'dense_0'",
    ),
    "distribute_tensor": (
        lambda _: kd.distribute_tensor(tf.ones(4), kd.TensorLayout(("model",), split().device_mesh)),
        NotImplementedError,
        "layouts of weights alone",
    ),
    "a device that is not there": (
        lambda _: kd.set_distribution(kd.DataParallel(devices=["cpu:0", "cpu:9"])),
        ValueError,
        "device 'cpu:9'",
    ),
    "some devices": (
        lambda _: kd.set_distribution(
            kd.ModelParallel(layout_map=kd.LayoutMap(kd.DeviceMesh((1, 2), MESH, ["cpu:0", "cpu:1"])))
        ),
        ValueError,
        "a mesh of cpu:0, cpu:1. Expected: all devices, each once: cpu:0, cpu:1, cpu:2, cpu:3",
    ),
    "a distribution of its own": (
        lambda _: kd.set_distribution(type("Mine", (kd.DataParallel.__base__,), {})(split().device_mesh)),
        NotImplementedError,
        "class Mine",
    ),
    "before initialize": (
        lambda patch: in_one_of_several(patch, lambda: kd.set_distribution(kd.DataParallel())),
        RuntimeError,
        r"one process of several \(rank 1 of 2, from TFDIST_RANK\). Expected: keras.distribution.initialize",
    ),
    "addresses without a process": (lambda _: kd.initialize("a:1,b:1", 2), ValueError, "and process_id"),
    "one address without a number": (lambda _: kd.initialize("a:1", process_id=0), ValueError, "and num_processes"),
    "a process too much": (lambda _: kd.initialize("a:1,b:1", 2, 2), tfdist.ClusterError, "worker 2"),
    "another number": (lambda _: kd.initialize(num_processes=2), ValueError, "num_processes=2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call(monkeypatch)
    assert kd.distribution() is None
