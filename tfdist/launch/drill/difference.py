"""Differences between the meta data of two checkpoints, in words. Pure functions only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

# What a fit has come to, as far as it is not in the tensors. The rest of the meta data says how to go on.
_COUNTERS = ("epoch", "steps", "total", "done", "stopped")


def differences(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What is different in the meta data of two final checkpoints: counters, and the callbacks with their History.

    Example:
        >>> meta = {"epoch": 2, "steps": 0, "total": 8, "done": True, "stopped": False, "callbacks": []}
        >>> differences(meta, {**meta, "total": 9})
        ['total: 8 in the reference, 9 here']
    """
    found = [line for name in _COUNTERS for line in _compare(reference.get(name), other.get(name), name)]
    ours, theirs = ([entry["class"] for entry in meta["callbacks"]] for meta in (reference, other))
    if ours != theirs:
        return [*found, *_say("callbacks", ours, theirs)]
    for mine, yours in zip(reference["callbacks"], other["callbacks"], strict=True):
        found += _compare(_plain(mine["state"]), _plain(yours["state"]), mine["class"])
    return found


def tensor_name(name: str, meta: Mapping[str, Any]) -> str:
    """What a tensor in a checkpoint is called by people: the path of its variable, where it is the value of one.

    Example:
        >>> tensor_name("model/0", {"variables": {"model/0": ["dense/kernel", [2, 2], "float32"]}})
        'dense/kernel'
    """
    return meta["variables"].get(name.removeprefix("replicas/"), [name])[0]


def _compare(reference: Any, other: Any, path: str) -> Iterator[str]:
    if type(reference) is not type(other):
        yield from _say(path, reference, other)
    elif isinstance(reference, dict):
        for key in [*reference, *(key for key in other if key not in reference)]:
            yield from _compare(reference.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(reference, list):
        if len(reference) != len(other):
            yield f"{path}: {len(reference)} entries in the reference, {len(other)} here"
        for number, (mine, yours) in enumerate(zip(reference, other, strict=False)):
            yield from _compare(mine, yours, f"{path}[{number}]")
    elif reference != other and not (reference != reference and other != other):  # not a number is equal to itself here
        yield from _say(path, reference, other)


def _say(path: str, reference: Any, other: Any) -> Iterator[str]:
    yield f"{path}: {reference!r} in the reference, {other!r} here"


def _plain(value: Any) -> Any:
    """The state of a callback such that it can be compared (see plain_data.py), arrays by their names."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "float":
        return float.fromhex(content)
    if kind in ("dict", "OrderedDict", "Counter"):
        return {_key(key): _plain(item) for key, item in content}
    return _plain(content)


def _key(key: Any) -> Any:
    return json.dumps(key) if isinstance(key, dict) else key
