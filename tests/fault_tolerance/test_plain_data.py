"""Values that a backup holds: each comes back as it was, of its own type, through JSON and a store."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import json
import pathlib
import random
import sys
import types
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.checkpoint.plain_data import NotPlainError, decode, encode
from tfdist.checkpoint.store import CheckpointStore
from tfdist.inspection.object_state import MISSING, NotRestoredError


class Phase(enum.Enum):
    WARM = "warm"


class Pair(NamedTuple):
    left: int
    right: str


@dataclasses.dataclass(frozen=True)
class Best:
    loss: float
    weights: tuple


@dataclasses.dataclass
class Count:
    value: int = 0


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Adventurous(enum.Enum):
    """Whose code runs where it is used in the usual way."""

    ONE = 1

    @classmethod
    def _missing_(cls, value: object) -> None:
        Path("made").touch()

    @property
    def property(self) -> type:
        Path("made").touch()
        return Adventurous


ADVENTUROUS = Adventurous.ONE


@dataclasses.dataclass
class Setting:
    """With a property that looks like a field."""

    _value: int

    @property
    def value(self) -> int:
        return self._value

    @value.setter
    def value(self, value: int) -> None:
        Path("made").touch()


class Fieldless(tuple):
    _fields = 1


class Later(NamedTuple):
    """As the program is after it has got another field."""

    loss: float
    epoch: int = 0


UTC = datetime.timezone.utc
# Sets of several texts are in another order in every process: neither their names here nor their repr would agree.
VALUES = [
    *(None, True, 2**80, -0.0, float("inf"), "text", b"\x00bytes\x00", bytearray(b"more"), 1 + 2j),
    *(np.float32(0.1), np.bool_(True), np.str_("text"), np.datetime64("2020-01-01", "D")),
    *([], (1, [2]), {"four"}, {3, 2.5, (5, 6)}, frozenset({b"x"}), {("a", 1): None, None: 2.5, 3: "4", Phase.WARM: ()}),
    *(collections.Counter("abca"), collections.OrderedDict(b=1, a=2), collections.deque([1, 2], maxlen=2)),
    collections.defaultdict(list, {"a": [1]}),
    *(datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.datetime(2020, 1, 1, tzinfo=UTC), datetime.date(2020, 1, 2)),
    *(datetime.time(1, 2), datetime.timedelta(-1, 2, 3), pathlib.Path("a/b"), Phase.WARM, Pair(1, "r")),
    *(Access.READ, Access.READ | Access.WRITE, Access(0), Setting(3)),
    *(Best(0.5, (1, 2)), [Count(1), Count(2)]),
]


def through_a_store(value: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    arrays: dict[str, Any] = {}
    encoded = json.loads(json.dumps(encode(value, arrays, "mine")))
    store = CheckpointStore(folder)
    store.write({}, arrays)
    return encoded, dict(store.newest().tensors)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_comes_back_exactly(value: Any, tmp_path: Path) -> None:
    for present in ({}, {"present": value}, {"present": MISSING}):
        found = decode(*through_a_store(value, tmp_path), **present)
        assert (type(found), found, repr(found)) == (type(value), value, repr(value))


@pytest.mark.parametrize(
    "array",
    [np.arange(6, dtype=">i2").reshape(2, 3), np.float16([np.nan, 1]), np.array(["a", "bc"]), np.array([], "M8[s]")],
    ids=repr,
)
def test_arrays(array: np.ndarray, tmp_path: Path) -> None:
    found = decode(*through_a_store([array], tmp_path))[0]
    assert (found.dtype.newbyteorder("="), found.shape) == (array.dtype.newbyteorder("="), array.shape)
    np.testing.assert_array_equal(found, array)


@pytest.mark.parametrize("value, dtype", [([1, 2], tf.bfloat16), (3, tf.int32), ([b"a\x00", b""], tf.string)])
def test_tensors(value: Any, dtype: tf.DType, tmp_path: Path) -> None:
    # Made here: nothing may use TensorFlow's devices before the tests run.
    tensor = tf.constant(value, dtype)
    found = decode(*through_a_store(tensor, tmp_path))
    assert isinstance(found, tf.Tensor) and (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    np.testing.assert_array_equal(found.numpy(), tensor.numpy())


def test_objects_get_their_state_back_in_place(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        means = {"a": keras.metrics.Mean(), "b": [keras.metrics.Mean()]}
        variables = {"v": tf.Variable([0.0]), "k": keras.Variable([1, 2]), "seed": keras.random.SeedGenerator(1)}
        generators = {"np": np.random.default_rng(1), "old": np.random.RandomState(2), "py": random.Random(3)}
        return {**means, **variables, **generators, "tf": tf.random.Generator.from_seed(4), "count": Count()}

    def draw(holder: dict[str, Any]) -> list[float]:
        numbers = [holder["np"].random(), holder["old"].rand(), holder["py"].random(), float(holder["tf"].uniform([]))]
        return [*numbers, float(keras.random.uniform([], seed=holder["seed"]))]

    one, other = make(), make()
    one["a"].update_state([1.0, 2.0])
    one["b"][0].update_state(5.0)
    one["v"].assign([7.0])
    one["k"].assign([3, 4])
    one["count"].value = 9
    draw(one)
    before = dict(other)
    found = decode(*through_a_store(one, tmp_path), other)
    assert all(found[name] is before[name] for name in before if name != "b") and found["b"][0] is before["b"][0]
    assert (float(found["a"].result()), float(found["a"].count), float(found["b"][0].result())) == (1.5, 2.0, 5.0)
    assert (found["v"].numpy().tolist(), found["k"].numpy().tolist(), found["count"]) == ([7.0], [3, 4], Count(9))
    assert draw(found) == draw(one)


def test_variables_in_data_come_back_as_arrays(tmp_path: Path) -> None:
    found = decode(*through_a_store([tf.Variable(2.0), keras.Variable([1.0])], tmp_path))
    assert [(type(array), array.tolist()) for array in found] == [(np.ndarray, 2.0), (np.ndarray, [1.0])]


@pytest.mark.parametrize("present", [MISSING, None, 3, keras.metrics.BinaryAccuracy])
def test_a_state_without_its_object(present: Any) -> None:
    arrays: dict[str, Any] = {}
    encoded = encode(keras.metrics.MeanSquaredError(), arrays, "mine")
    with pytest.raises(NotRestoredError, match="this process has no such object in its place"):
        decode(encoded, arrays, present)


def test_what_is_saved_elsewhere_is_left_alone() -> None:
    model = keras.Sequential()
    encoded = encode([model], {}, "mine", {id(model)})
    assert encoded == {"list": [{"elsewhere": True}]}
    assert decode(encoded, {}, [model]) == [model]


def test_a_named_tuple_that_has_got_a_field() -> None:
    assert decode({"namedtuple": [f"{__name__}:Later", [0.5]]}, {}) == Later(0.5, 0)
    with pytest.raises(NotRestoredError, match="Later has 2 fields in this program, not 0"):
        decode({"namedtuple": [f"{__name__}:Later", []]}, {})


class Local:
    pass


@pytest.mark.parametrize(
    "value",
    [Local(), {"a": [Local()]}, np.array([None]), np.ma.array([1]), collections.defaultdict(lambda: 1), lambda: 1],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved(value: Any) -> None:
    with pytest.raises(NotPlainError, match=r"^Received: a .*\. Expected: "):
        encode(value, {}, "mine")


@pytest.mark.parametrize(
    "encoded",
    [
        {"enum": ["pathlib:Path.touch", {"path": "made"}]},
        {"enum": ["pathlib:Path", "made"]},
        {"namedtuple": ["os:system", ["touch made"]]},
        {"namedtuple": ["builtins:list", []]},
        {"dataclass": ["subprocess:Popen", []]},
        {"dataclass": ["no_module:Best", []]},
        {"generator": ["seed", {"dict": []}]},
        {"generator": ["mtrand", {"dict": []}]},
        {"enum": [f"{__name__}:ADVENTUROUS.property", 1]},
        {"enum": [f"{__name__}:Adventurous", 7]},
        {"dataclass": [f"{__name__}:Setting", [["value", 1]]]},
        {"namedtuple": [f"{__name__}:Pair", [1, 2, 3]]},
        {"namedtuple": [f"{__name__}:Fieldless", []]},
        {"enum": ["lazy_module_of_this_test:Colour", 1]},
    ],
    ids=str,
)
def test_a_backup_cannot_call_what_it_names(encoded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lazy = types.ModuleType("lazy_module_of_this_test")
    lazy.__getattr__ = lambda name: Path("made").touch()
    monkeypatch.setitem(sys.modules, lazy.__name__, lazy)
    with pytest.raises(NotRestoredError):
        decode(encoded, {})
    assert list(tmp_path.iterdir()) == []


def test_a_set_is_written_in_one_order() -> None:
    assert encode({"b", "a", "c"}, {}, "")["set"] == ["a", "b", "c"]
