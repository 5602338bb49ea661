"""Values that a backup holds: each comes back as it was, of its own type, through JSON and a store."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import json
import pathlib
import random
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist.checkpoint.callback_state import MISSING, NotPlainError, NotRestoredError, decode, encode
from tfdist.checkpoint.store import CheckpointStore


class Phase(enum.Enum):
    WARM = "warm"


class Pair(NamedTuple):
    left: int
    right: str


@dataclasses.dataclass
class Count:
    value: int = 0


UTC = datetime.timezone.utc
# Sets of several texts are in another order in every process: neither their names here nor their repr would agree.
VALUES = [
    *(None, True, 2**80, -0.0, float("inf"), "text", b"\x00bytes\x00", bytearray(b"more"), 1 + 2j),
    *(np.float32(0.1), np.bool_(True)),
    *([], (1, [2]), {"four"}, {3, 2.5, (5, 6)}, frozenset({b"x"}), {("a", 1): None, None: 2.5, 3: "4", 5: ()}),
    *(collections.Counter("abca"), collections.OrderedDict(b=1, a=2), collections.deque([1, 2], maxlen=2)),
    collections.defaultdict(list, {"a": [1]}),
    *(datetime.datetime(2020, 1, 2, 3, 4, 5, 6), datetime.datetime(2020, 1, 1, tzinfo=UTC), datetime.date(2020, 1, 2)),
    *(datetime.time(1, 2), datetime.timedelta(-1, 2, 3), pathlib.Path("a/b")),
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
    [np.arange(6, dtype=">i2").reshape(2, 3), np.float16([np.nan, 1]), np.ones(2, tf.bfloat16.as_numpy_dtype)],
    ids=repr,
)
def test_arrays(array: np.ndarray, tmp_path: Path) -> None:
    found = decode(*through_a_store([array], tmp_path))[0]
    assert (found.dtype.newbyteorder("="), found.shape) == (array.dtype.newbyteorder("="), array.shape)
    np.testing.assert_array_equal(found, array)


def test_objects_get_their_state_back_in_place(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        means = {"a": keras.metrics.Mean(), "b": [keras.metrics.Mean()]}
        variables = {"v": tf.Variable([0.0]), "k": keras.Variable([1, 2]), "seed": keras.random.SeedGenerator(1)}
        generators = {"np": np.random.default_rng(1), "old": np.random.RandomState(2), "py": random.Random(3)}
        return {**means, **variables, **generators, "tf": tf.random.Generator.from_seed(4)}

    def draw(holder: dict[str, Any]) -> list[float]:
        numbers = [holder["np"].random(), holder["old"].rand(), holder["py"].random(), float(holder["tf"].uniform([]))]
        return [*numbers, float(keras.random.uniform([], seed=holder["seed"]))]

    one, other = make(), make()
    one["a"].update_state([1.0, 2.0])
    one["b"][0].update_state(5.0)
    one["v"].assign([7.0])
    one["k"].assign([3, 4])
    draw(one)
    before = dict(other)
    found = decode(*through_a_store(one, tmp_path), other)
    assert all(found[name] is before[name] for name in before if name != "b") and found["b"][0] is before["b"][0]
    assert (float(found["a"].result()), float(found["a"].count), float(found["b"][0].result())) == (1.5, 2.0, 5.0)
    assert (found["v"].numpy().tolist(), found["k"].numpy().tolist()) == ([7.0], [3, 4])
    assert draw(found) == draw(one)


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


class Local:
    pass


@pytest.mark.parametrize(
    "value",
    [
        Local(),
        {"a": [Local()]},
        np.array([None]),
        np.ma.array([1]),
        collections.defaultdict(lambda: 1),
        lambda: 1,
        Phase.WARM,
        Pair(1, "r"),
        Count(),
        np.array(["a"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved(value: Any) -> None:
    with pytest.raises(NotPlainError, match=r"^Received: a .*\. Expected: "):
        encode(value, {}, "mine")


@pytest.mark.parametrize(
    "encoded",
    [
        {"enum": ["pathlib:Path.touch", {"path": "made"}]},
        {"namedtuple": ["os:system", ["touch made"]]},
        {"dataclass": ["subprocess:Popen", []]},
        {"generator": ["seed", {"dict": []}]},
        {"generator": ["mtrand", {"dict": []}]},
    ],
    ids=str,
)
def test_a_backup_cannot_call_what_it_names(encoded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotRestoredError):
        decode(encoded, {})
    assert list(tmp_path.iterdir()) == []


def test_a_set_is_written_in_one_order() -> None:
    assert encode({"b", "a", "c"}, {}, "")["set"] == ["a", "b", "c"]
