from __future__ import annotations

import copy

import pytest

from tfdist.launcher.drill.comparison import differences, tensor_name


def encoded(loss: list[float]) -> dict:
    history = [["loss", {"list": [{"float": value.hex()} for value in loss]}]]
    return {"dict": [["history", {"dict": history}], ["epoch", {"list": [0, 1]}], ["range", {"tuple": [1, 2]}]]}


META = {
    "epoch": 2,
    "steps": 0,
    "total": 8,
    "done": True,
    "stopped": False,
    "random": [1, 2, 3],
    "callbacks": [
        {"class": "History", "compares": False, "state": encoded([0.5, 0.1])},
        {"class": "Mine", "compares": False, "state": {"dict": [["best", {"array": "callbacks/1/9", "scalar": True}]]}},
    ],
    "variables": {"model/0": ["dense/kernel", [2], "float32"]},
}


def changed(**fields) -> dict:
    return {**copy.deepcopy(META), **fields}


def test_nothing_differs() -> None:
    assert differences(META, changed(random=[4])) == []


def test_a_counter() -> None:
    assert differences(META, changed(total=9)) == ["total: 8 in the reference, 9 here"]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ([0.5, 0.2], ["History.history.loss[1]: 0.1 in the reference, 0.2 here"]),
        ([0.5, float("nan")], ["History.history.loss[1]: 0.1 in the reference, nan here"]),
        ([0.5], ["History.history.loss: 2 entries in the reference, 1 here"]),
    ],
)
def test_the_history(loss: list[float], expected: list[str]) -> None:
    other = changed()
    other["callbacks"][0]["state"] = encoded(loss)
    assert differences(META, other) == expected


def test_all_kinds_of_state() -> None:
    def state(**changes: object) -> dict:
        keys = [[{"tuple": ["a", 1]}, {"set": [1, 2]}], [None, {"bytes": "eA=="}], [2, {"deque": [None, [3]]}]]
        parts = {"pairs": {"dict": keys}, "when": {"datetime": "2020-01-01T00:00:00"}, "number": {"variable": "v/0"}}
        parts["record"] = {"dataclass": ["m:Count", [["value", {"float": "0x1.8p+0"}]]]}
        return changed(callbacks=[{"class": "Own", "state": {"dict": [*({**parts, **changes}).items()]}}])

    assert differences(state(), state()) == []
    assert differences(state(), state(pairs={"dict": [[{"tuple": ["a", 1]}, {"set": [1, 3]}]]})) == [
        'Own.pairs.{"tuple": ["a", 1]}[1]: 2 in the reference, 3 here',
        "Own.pairs.None: 'eA==' in the reference, None here",
        "Own.pairs.2: [None, [3]] in the reference, None here",
    ]
    assert differences(state(), state(record={"dataclass": ["m:Count", [["value", {"float": "0x1.0p+0"}]]]})) == [
        "Own.record[1][0][1]: 1.5 in the reference, 1.0 here"
    ]


def test_not_a_number_in_both() -> None:
    one, other = changed(), changed()
    for meta in (one, other):
        meta["callbacks"][0]["state"] = encoded([float("nan"), float("inf")])
    assert differences(one, other) == []


def test_an_attribute_that_only_one_has() -> None:
    other = changed()
    other["callbacks"][1]["state"] = {"dict": [["worst", 3]]}
    assert differences(META, other) == [
        "Mine.best: 'callbacks/1/9' in the reference, None here",
        "Mine.worst: None in the reference, 3 here",
    ]


def test_other_callbacks() -> None:
    assert differences(META, changed(callbacks=META["callbacks"][:1])) == [
        "callbacks: ['History', 'Mine'] in the reference, ['History'] here"
    ]


def test_names_of_tensors() -> None:
    names = ("model/0", "replicas/model/0", "callbacks/1/9")
    assert [tensor_name(name, META) for name in names] == ["dense/kernel", "dense/kernel", "callbacks/1/9"]
