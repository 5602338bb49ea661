"""Negative controls: a restored backup in which one piece of state is missing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tfdist.checkpoint.store import Checkpoint, SharedStore
from tfdist.checkpoint.training_state import TrainingState
from tfdist.inspection.model_state import random_state


def _without(chosen: Callable[[str, str], bool]) -> Callable[[Checkpoint], Checkpoint]:
    """Leaves out the variables whose name and path are chosen: they keep what they begin with."""

    def change(checkpoint: Checkpoint) -> Checkpoint:
        left_out = {
            f"{prefix}{name}"
            for name, (path, *_) in checkpoint.meta["variables"].items()
            for prefix in ("", "replicas/")
            if chosen(name, path)
        }
        tensors = {name: value for name, value in checkpoint.tensors.items() if name not in left_out}
        assert len(tensors) < len(checkpoint.tensors)
        return dataclasses.replace(checkpoint, tensors=tensors)

    return change


def _meta(**changes: Callable[[Any], Any]) -> Callable[[Checkpoint], Checkpoint]:
    def change(checkpoint: Checkpoint) -> Checkpoint:
        changed = {name: function(checkpoint.meta[name]) for name, function in changes.items()}
        return dataclasses.replace(checkpoint, meta={**checkpoint.meta, **changed})

    return change


def _callback(name: str) -> Callable[[Checkpoint], Checkpoint]:
    def forget(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        assert any(entry["class"] == name for entry in entries)
        return [{**entry, "state": {"dict": []}} if entry["class"] == name else entry for entry in entries]

    return _meta(callbacks=forget)


OMISSIONS: dict[str, Callable[[Checkpoint], Checkpoint]] = {
    "optimizer": _without(lambda name, path: name.startswith("optimizer/")),
    "rests": _without(lambda name, path: name.startswith("compression/")),
    "metrics": _without(lambda name, path: name.startswith("metrics/")),
    "Keeper": _callback("Keeper"),
    "random numbers": _meta(random=lambda state: random_state()),
    "CSV": _meta(csv=lambda lengths: {}),
    "batches": _meta(position=lambda position: {**position, "taken": 0}),
    "validations": _meta(validations=lambda count: 0),
    "nothing": lambda checkpoint: checkpoint,
}


def leave_out(name: str) -> None:
    """Lets this process miss something of every backup that it finds."""
    original = SharedStore.newest

    def newest(self: SharedStore, prefer: Callable[[dict], bool]) -> Checkpoint | None:
        checkpoint = original(self, prefer)
        return checkpoint and OMISSIONS[name](checkpoint)

    SharedStore.newest = newest
    check = TrainingState.check
    # It would refuse a backup that lacks values.
    TrainingState.check = lambda self, saved, tensors, with_metrics: check(self, saved, saved, with_metrics)
