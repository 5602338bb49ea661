"""What processes tell each other outside of the step: who waits for what, and when that can never come."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfdist.cluster.key_value import ProcessGoneError
from tfdist.runtime import peers
from tfdist.runtime.peers import Peers, PeerTimeoutError

NAMES = ["chief (a:1)", "worker 1 (b:1)"]


class Texts:
    """A store that all threads share."""

    def __init__(self):
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def set(self, name: str, text: str) -> None:
        self.decide(name, text)

    def decide(self, name: str, text: str) -> str:
        with self._changed:
            self._changed.notify_all()
            return self._texts.setdefault(name, text)

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: name in self._texts, seconds)
            return self._texts.get(name)


class Late(Texts):
    """Answers the first questions for one text as a busy store does: not in time."""

    def __init__(self, name: str, times: int):
        super().__init__()
        self._name, self._left = name, times

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        if name == self._name and self._left:
            self._left -= 1
            return None
        return super().get(name, seconds, of)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(peers, "_FIRST_POLL_SECONDS", 0.2)
    monkeypatch.setattr(peers, "_POLL_SECONDS", 1.0)


def test_each_waits_for_the_other_in_another_place():
    store = Texts()
    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        fit = pool.submit(Peers(NAMES, 0, 60, store).gather, "dataset", 1, "start fit")
        evaluate = pool.submit(Peers(NAMES, 1, 60, store).gather, "evaluation", 1, "start evaluate")
        with pytest.raises(PeerTimeoutError) as of_chief:
            fit.result()
        with pytest.raises(PeerTimeoutError) as of_worker:
            evaluate.result()
    assert time.monotonic() - began < 30
    assert str(of_chief.value).startswith(
        "chief (a:1) waits for worker 1 (b:1) to start fit, while worker 1 (b:1) waits for chief (a:1) to start "
    )
    assert "worker 1 (b:1) waits for chief (a:1) to start evaluate, while chief" in str(of_worker.value)


def test_what_comes_after_the_last_look_counts():
    """The other process has told it, and waits for what this one tells next: nobody waits for ever."""
    store = Late("tfdist/step/1/1", times=1)
    chief = Peers(NAMES, 0, 60, store)
    store.set("tfdist/step/1/1", json.dumps("told"))
    store.set("tfdist/waits/1/1", json.dumps([0, "later/1/0", "save"]))
    assert chief.hear("step/1/1", 1, "take a step") == "told"


def test_what_is_told_is_not_waited_for():
    """A process says that it waits, and hears it a moment later."""
    store = Late("tfdist/step/1/1", times=3)
    chief = Peers(NAMES, 0, 60, store)
    chief.tell("step/1/0", 1)
    store.set("tfdist/waits/1/1", json.dumps([0, "step/1/0", "take a step"]))
    store.set("tfdist/step/1/1", json.dumps("told"))
    assert chief.hear("step/1/1", 1, "take a step") == "told"


def test_what_is_not_told_ends_the_wait():
    store = Texts()
    store.set("tfdist/waits/1/1", json.dumps([0, "later/1/0", "save"]))
    with pytest.raises(PeerTimeoutError, match=r"waits for worker 1 \(b:1\) to take a step, while .* to save\."):
        Peers(NAMES, 0, 60, store).hear("step/1/1", 1, "take a step")


@pytest.mark.timeout(60)
def test_a_process_that_was_killed_is_not_waited_for():
    chief = Peers(NAMES, 0, 600, Texts(), is_gone=lambda rank: rank == 1)
    with pytest.raises(ProcessGoneError, match=r"waited for worker 1 \(b:1\) to take a step, and that process is gone"):
        chief.hear("step/1/1", 1, "take a step")
    chief.wait_until_left(600)


@pytest.mark.parametrize(
    ("name", "expected"), [("step/1/1", None), ("left/1", r"to take a step, and that program has ended\.")]
)
def test_what_a_process_did_last_is_found_after_its_end(name: str, expected: str | None):
    store = Texts()

    def is_gone(rank: int) -> bool:
        store.set(f"tfdist/{name}", json.dumps(True))
        return True

    chief = Peers(NAMES, 0, 60, store, is_gone)
    if expected is None:
        assert chief.hear("step/1/1", 1, "take a step") is True
    else:
        with pytest.raises(ProcessGoneError, match=expected):
            chief.hear("step/1/1", 1, "take a step")
