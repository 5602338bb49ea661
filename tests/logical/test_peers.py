"""What processes tell each other outside of the step: who waits for what, and when that can never come."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from tests.launcher.conftest import wait_until
from tfdist.cluster.server import ProcessGoneError
from tfdist.runtime import peers
from tfdist.runtime.peers import Peers, PeerTimeoutError

NAMES = ["chief (a:1)", "worker 1 (b:1)"]


class Texts:
    """A store that all threads share."""

    def __init__(self):
        self._texts: dict[str, str] = {}
        self._changed = threading.Condition()
        self.reads = 0
        self.gone: set[int | None] = set()

    def set(self, name: str, text: str) -> None:
        with self._changed:
            self._texts[name] = text
            self._changed.notify_all()

    def delete(self, name: str) -> None:
        with self._changed:
            self._texts.pop(name, None)

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        self.reads += 1
        with self._changed:
            self._changed.wait_for(lambda: name in self._texts or of in self.gone, seconds)
            if name not in self._texts and of in self.gone:
                raise ProcessGoneError
            return self._texts.get(name)

    def glance(self, name: str) -> str | None:
        return self.get(name, 0.0)


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
    with ThreadPoolExecutor(2) as pool:
        fit = pool.submit(Peers(NAMES, 0, 600, store).gather, "dataset", 1, "start fit")
        evaluate = pool.submit(Peers(NAMES, 1, 600, store).gather, "evaluation", 1, "start evaluate")
        with pytest.raises(PeerTimeoutError) as of_chief:
            fit.result()
        with pytest.raises(PeerTimeoutError) as of_worker:
            evaluate.result()
    assert str(of_chief.value).startswith(
        "chief (a:1) waits for worker 1 (b:1) to start fit, while worker 1 (b:1) waits for chief (a:1) to start "
    )
    assert "worker 1 (b:1) waits for chief (a:1) to start evaluate, while chief" in str(of_worker.value)


def test_what_comes_after_the_last_look_counts():
    """The other process has told it, and waits for what this one tells next: nobody waits for ever."""
    store = Late("tfdist/step/1/1", times=1)
    chief = Peers(NAMES, 0, 60, store)
    store.set("tfdist/step/1/1", json.dumps("told"))
    store.set("tfdist/waits/1", json.dumps([1, 0, "later/1/0", "save"]))
    assert chief.hear("step/1/1", 1, "take a step") == "told"


def test_what_is_not_told_ends_the_wait():
    store = Texts()
    store.set("tfdist/waits/1", json.dumps([1, 0, "later/1/0", "save"]))
    with pytest.raises(PeerTimeoutError, match=r"waits for worker 1 \(b:1\) to take a step, while .* to save\."):
        Peers(NAMES, 0, 60, store).hear("step/1/1", 1, "take a step")


def test_only_main_threads_that_wait_for_what_is_not_told_wait_in_vain(monkeypatch: pytest.MonkeyPatch):
    """A thread that writes a backup may wait for others while these exchange gradients."""
    store = Texts()
    chief = Peers(NAMES, 0, 60, store)

    def found(*wait: object) -> str:
        store.set("tfdist/waits/1", json.dumps(wait))
        return chief.waits_in_vain(1)

    # What it has exchanged before may be on its way.
    assert found(1, 0, "later/1/0", "save", True) == ""
    monkeypatch.setattr(peers, "_IN_VAIN_SECONDS", 0.0)
    why = found(1, 0, "later/1/0", "save", True)
    assert why.startswith("worker 1 (b:1) waits for chief (a:1) to save. Every process has to make the same calls")
    assert found(1, 0, "later/1/0", "save", False) == found(1, 1, "later/1/0", "save", True) == ""
    chief.tell("later/1/0", 1)
    assert found(1, 0, "later/1/0", "save", True) == ""


@pytest.mark.timeout(60)
def test_a_process_that_was_killed_is_not_waited_for():
    store = Texts()
    store.gone.add(1)
    chief = Peers(NAMES, 0, 600, store)
    with pytest.raises(ProcessGoneError, match=r"waited for worker 1 \(b:1\) to take a step, and that process is gone"):
        chief.hear("step/1/1", 1, "take a step")
    chief.wait_until_left(600)


@pytest.mark.parametrize(
    ("name", "expected"), [("step/1/1", None), ("left/1", r"to take a step, and that program has ended\.")]
)
def test_what_a_process_did_last_is_found_after_its_end(name: str, expected: str | None):
    store = Texts()
    store.set(f"tfdist/{name}", json.dumps(True))
    store.gone.add(1)
    chief = Peers(NAMES, 0, 60, store)
    if expected is None:
        assert chief.hear("step/1/1", 1, "take a step") is True
    else:
        with pytest.raises(ProcessGoneError, match=expected):
            chief.hear("step/1/1", 1, "take a step")


def test_an_exchange_takes_two_reads_a_process_and_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "_FIRST_POLL_SECONDS", 60.0)  # who looks again reads more
    store, size, times = Texts(), 8, 50
    everyone = [Peers([f"worker {rank}" for rank in range(size)], rank, 60, store) for rank in range(size)]

    def exchange(own: Peers) -> list:
        topics = [topic for _ in range(times) for topic in ("stop", "files")]
        return [own.gather(topic, [own.rank, number], "train") for number, topic in enumerate(topics)]

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(exchange, everyone))
    assert results == [[[[rank, number] for rank in range(size)] for number in range(2 * times)]] * size
    # Rank 0 reads what each of the others tells, and each of those what it has collected.
    assert store.reads == 2 * times * 2 * (size - 1)
    kept = [name for name in store._texts if not name.startswith("tfdist/waits/")]
    assert sorted(kept) == [f"tfdist/files/{times}/all", f"tfdist/stop/{times}/all"]
    assert all(len(own._told) < 10 for own in everyone)


@pytest.mark.parametrize("gone", [False, True])
def test_all_are_told_who_has_not_come(gone: bool):
    store, names = Texts(), ["chief", "worker 1", "worker 2", "worker 3"]
    store.gone |= {2} if gone else set()
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(Peers(names, rank, 60, store).gather, "stop", 1, "train") for rank in (1, 3)]
        wait_until(lambda: {"tfdist/stop/1/1", "tfdist/stop/1/3"} <= store._texts.keys(), 60, "those who come")
        futures.insert(0, pool.submit(Peers(names, 0, 1.0, store).gather, "stop", 1, "train"))
        failures = [future.exception(60) for future in futures]
    assert len({str(failure) for failure in failures}) == 1
    assert [type(failure) for failure in failures] == [ProcessGoneError if gone else PeerTimeoutError] * 3
    assert "chief waited " in str(failures[0]) and "for worker 2 to train, and " in str(failures[0])


@pytest.mark.nightly
def test_one_that_comes_in_the_time_of_rank_0_is_in_time_for_all(monkeypatch: pytest.MonkeyPatch):
    now, store, names = [0.0], Texts(), ["chief", "worker 1", "worker 2"]
    monkeypatch.setattr(peers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(peers, "_LAST_WORDS_SECONDS", 500.0)
    everyone = [Peers(names, rank, 4000.0, store) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(everyone[1].gather, "stop", 1, "train")]
        wait_until(lambda: everyone[1]._waits[1] == 1, 60, "worker 1")
        now[0] = 2500.0
        futures.insert(0, pool.submit(everyone[0].gather, "stop", 0, "train"))
        wait_until(lambda: 0 in everyone[1]._last_waits, 60, "worker 1 to hear of rank 0")
        # The time of worker 1 is over before worker 2 comes; that of rank 0 is not.
        now[0] = 5000.0
        wait_until(lambda: everyone[1]._waits[1] == 2, 60, "worker 1 to wait again")
        futures.append(pool.submit(everyone[2].gather, "stop", 2, "train"))
        assert [future.result(60) for future in futures] == [[0, 1, 2]] * 3


def test_who_waited_for_an_exchange_that_is_over_is_not_taken_to_wait():
    """Its wait of long ago is the last that others have heard of."""
    store = Texts()
    with ThreadPoolExecutor(2) as pool:
        chief, worker = Peers(NAMES, 0, 60, store), Peers(NAMES, 1, 60, store)
        early = pool.submit(worker.gather, "stop", 1, "train")
        wait_until(lambda: "tfdist/waits/1" in store._texts, 60, "the early one to say that it waits")
        assert chief.gather("stop", 0, "train") == early.result() == [0, 1]
        late = pool.submit(chief.gather, "stop", 0, "train")
        wait_until(lambda: "tfdist/waits/0" in store._texts, 60, "the late one to say that it waits")
        assert not late.done()
        assert worker.gather("stop", 1, "train") == late.result() == [0, 1]
