"""Who takes part in the rounds of workers that come and go; workers are threads here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.ports import reserve
from tfdist.runtime.rounds import FIRST, MEAN, Membership, RoundError, Rounds

pytestmark = pytest.mark.timeout(60)
START = (1, 0, 0)


class Workers:
    """Rank 0 and others; each call runs in a thread."""

    def __init__(self, count: int, least: int, patience: float) -> None:
        with reserve(1) as ports:
            self._cluster = ClusterConfig(
                {"worker": [f"127.0.0.1:{ports.ports[0]}", *(f"a{i}:1" for i in range(1, count))]}
            )
        self._names, self._patience = [f"worker {rank}" for rank in range(count)], patience
        rounds = Rounds(self._names, least, patience, start_timeout=20.0, timeout=2.0)
        self.all: dict[int, Membership] = {0: Membership(self._cluster, self._names, rounds, patience, 20.0)}
        for rank in range(1, count):
            self.start(rank)
        self._pool = ThreadPoolExecutor(16)

    def start(self, rank: int) -> None:
        """Connects a worker, or the next one of this rank."""
        cluster = self._cluster.with_task("worker", rank)
        self.all[rank] = Membership(cluster, self._names, None, self._patience, 20.0)

    def soon(self, function: Callable, *args: Any) -> Future:
        return self._pool.submit(function, *args)

    def begin(self, place: tuple = START) -> dict[int, Any]:
        """All follow, and rank 0 begins: what each gets."""
        found = {rank: self.soon(one.follow, place) for rank, one in self.all.items() if rank}
        self.all[0].rounds.begin(place)
        self.all[0].rounds.give(place, [np.arange(3.0)])
        return {rank: one.result(30) for rank, one in found.items()}

    def bring(self, step: int, *ranks: int) -> dict[int, Any]:
        """A round of these: each brings its rank, with rank + 1 rows."""
        found = {rank: self.brings(rank, step) for rank in ranks}
        return {rank: one.result(30) for rank, one in found.items()}

    def brings(self, rank: int, step: int, stops: bool = False) -> Future:
        arrays = [np.full((2, 1), rank, "float32"), np.array(7 + rank)]
        return self.soon(self.all[rank].bring, (1, 0, step), stops, rank + 1.0, [MEAN, FIRST], arrays)

    def close(self) -> None:
        for rank in sorted(self.all, reverse=True):
            self.all[rank].leave()
        self._pool.shutdown(wait=False)


@contextlib.contextmanager
def workers(count: int = 3, least: int = 1, patience: float = 10.0) -> Iterator[Workers]:
    found = Workers(count, least, patience)
    try:
        yield found
    finally:
        found.close()


def mean(*ranks: int) -> float:
    return sum(rank * (rank + 1) for rank in ranks) / sum(rank + 1 for rank in ranks)


def test_all_bring_and_hear_the_same() -> None:
    with workers() as job:
        for place, state in job.begin().values():
            assert place == START
            np.testing.assert_array_equal(state[0], [0.0, 1.0, 2.0])
        for found in job.bring(4, 0, 1, 2).values():
            assert (found.workers, found.stops) == (3, False)
            np.testing.assert_allclose(found.arrays[0], np.full((2, 1), mean(0, 1, 2)), rtol=1e-6)
            assert found.arrays[1].shape == ()
            assert found.arrays[1] == 7
        said = [job.soon(one.share, "epoch", [rank]) for rank, one in job.all.items()]
        assert [one.result(30) for one in said] == [{0: [0], 1: [1], 2: [2]}] * 3


def test_the_others_go_on_without_one_that_is_gone_and_take_it_in_again() -> None:
    with workers() as job:
        job.begin()
        job.bring(4, 0, 1, 2)
        job.all[2]._socket.close()
        assert job.bring(8, 0, 1)[0].workers == 2
        job.start(2)
        assert job.all[2].follow(START) is None
        assert job.all[2].follow((1, 0, 8)) is None
        follows = job.soon(job.all[2].follow, (1, 0, 12))
        while not job.all[0].rounds._following:
            assert not follows.done()
        assert job.bring(12, 0, 1)[1].workers == 2
        assert job.all[0].rounds.awaits_state
        job.all[0].rounds.give((1, 0, 12), [np.ones(2)])
        assert follows.result(30)[0] == (1, 0, 12)
        assert job.bring(16, 0, 1, 2)[2].workers == 3


def test_one_that_does_not_come_in_time_is_left_out_and_told() -> None:
    with workers(patience=1.0) as job:
        job.begin()
        assert job.bring(4, 0, 1)[0].workers == 2
        assert job.bring(4, 2)[2] is None
        # What is said meanwhile is kept.
        said = [job.soon(job.all[rank].share, "epoch", rank) for rank in (0, 1)]
        assert said[0].result(30) == {0: 0, 1: 1}
        assert job.all[2].share("epoch", 2) == {0: 0, 1: 1}


def test_a_round_waits_for_enough_workers() -> None:
    with workers(least=3) as job:
        job.begin()
        job.all[2]._socket.close()
        waiting = [job.brings(rank, 4) for rank in (0, 1)]
        job.start(2)
        follows = job.soon(job.all[2].follow, (1, 0, 4))
        assert waiting[0].result(30).workers == 2
        job.all[0].rounds.give((1, 0, 4), [])
        assert follows.result(30) is not None


def test_too_few_workers_are_an_error_on_all() -> None:
    with workers(least=3) as job:
        job.begin()
        job.all[2]._socket.close()
        for one in [job.brings(rank, 4) for rank in (0, 1)]:
            with pytest.raises(RoundError, match="at least min_workers=3"):
                one.result(30)


def test_a_fit_may_end_with_fewer_and_the_next_one_waits_for_more() -> None:
    with workers(2, least=2) as job:
        job.begin()
        job.bring(4, 0, 1)
        job.all[1]._socket.close()
        job.all[0].rounds.begin((1, 2**31, 0))
        job.all[0].rounds.begin((2, 0, 0))
        with pytest.raises(RoundError, match="at least min_workers=2"):
            job.brings(0, 4).result(30)


def test_other_numbers_of_steps_are_an_error_unless_one_stops() -> None:
    with workers(2) as job:
        job.begin()
        stops = [job.brings(0, 4), job.brings(1, 2, stops=True)]
        assert [one.result(30).stops for one in stops] == [True, True]
        for one in [job.brings(0, 8), job.brings(1, 6)]:
            with pytest.raises(RoundError, match="at different steps"):
                one.result(30)


def test_rows_of_nothing_do_not_count() -> None:
    with workers(2) as job:
        job.begin()
        nan = [np.array([np.nan], "float32")]
        one = job.soon(job.all[1].bring, (1, 0, 4), False, 0.0, [MEAN], nan)
        found = job.all[0].bring((1, 0, 4), False, 3.0, [MEAN], [np.array([2.0], "float32")])
        assert found.arrays[0] == one.result(30).arrays[0] == [2.0]


def test_a_message_that_is_none_ends_its_connection_only() -> None:
    with workers() as job:
        job.begin()
        with pytest.raises(RoundError):
            job.all[2]._patience = 0.1
            job.all[0]._listener.leave()
            job.all[2]._ask(["bring", "everything"], [])
        assert job.bring(4, 0, 1)[1].workers == 2


def test_threads_end_with_their_workers() -> None:
    with workers() as job:
        job.begin()
    left = [one for one in threading.enumerate() if one.name.startswith("tfdist-rounds")]
    for one in left:
        one.join(20)
        assert not one.is_alive()
