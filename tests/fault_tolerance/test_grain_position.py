"""Positions in Grain datasets: where they are noted, and that what was consumed is not read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import tfdist

grain = pytest.importorskip("grain", reason="Grain is not installed: pip install grain")
from tfdist.checkpoint.position.grain import RecordedDataset  # noqa: E402 - it imports Grain

ROWS = 1_000


class Counted:
    """Numbers as rows; counts how often one is read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> np.int64:
        self.read.append(int(index))
        return np.int64(index)


def of_map(source: Counted) -> Any:
    return grain.MapDataset.source(source).shuffle(seed=1).batch(10)


def of_iterator(source: Counted) -> Any:
    rows = grain.MapDataset.source(source).shuffle(seed=1).to_iter_dataset(grain.ReadOptions(1, 20))
    return grain.experimental.WindowShuffleIterDataset(rows, window_size=50, seed=2).batch(10)


def of_loader(source: Counted) -> Any:
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=1, num_epochs=1)
    return grain.DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[grain.transforms.Batch(10)],
        read_options=grain.ReadOptions(1, 20),
        worker_count=0,
    )


@pytest.mark.parametrize("make", [of_map, of_iterator, of_loader])
def test_goes_on_where_it_was_and_reads_nothing_again(make: Any) -> None:
    expected = [batch.tolist() for batch in make(Counted())]
    recorded = RecordedDataset(make(Counted()))
    iterator = iter(recorded)
    for _ in range(70):
        next(iterator)
    state = recorded.state_after(60)  # the others were read ahead
    source = Counted()
    other = RecordedDataset(make(source))
    other.check(state)
    other.begin_at(60, state)
    source.read.clear()
    assert [batch.tolist() for batch in other] == expected[60:]
    # A window of rows is read again, since its rows are mixed.
    assert len(source.read) <= ROWS - 600 + 50
    # An iterator after that begins at the beginning.
    assert next(iter(other)).tolist() == expected[0]


def recorded_state(make: Any, taken: int) -> str:
    recorded = RecordedDataset(make(Counted()))
    iterator = iter(recorded)
    for _ in range(taken):
        next(iterator)
    return recorded.state_after(taken)


def test_states_are_forgotten_but_for_those_that_may_be_asked_for() -> None:
    recorded = RecordedDataset(of_map(Counted()))
    iterator = iter(recorded)
    for _ in range(30):
        next(iterator)
    recorded.forget_before(20)
    assert json.loads(recorded.state_after(20)) == {"next_index": 20}
    assert json.loads(recorded.state_after(27)) == {"next_index": 27}
    # The data have ended within an execution of several steps.
    assert recorded.state_after(33) == recorded.state_after(30)
    assert len(recorded._states) == 11


def test_an_address_in_what_grain_compares_is_no_difference() -> None:
    state = recorded_state(of_loader, 3)
    assert " at 0x" in json.loads(state)["data_source"]
    RecordedDataset(of_loader(Counted())).check(state)


def test_another_sampler_is_refused() -> None:
    state = recorded_state(of_loader, 3)
    sampler = grain.samplers.IndexSampler(ROWS, shuffle=True, seed=2, num_epochs=1)
    other = grain.DataLoader(data_source=Counted(), sampler=sampler, operations=[grain.transforms.Batch(10)])
    with pytest.raises(ValueError, match=r"does not take the saved position: Sampler in checkpoint does not match"):
        RecordedDataset(other).check(state)


class Stateless(grain.IterDataset):
    """A dataset of a user's whose state JSON cannot hold."""

    def __iter__(self) -> grain.DatasetIterator:
        class Iterator(grain.DatasetIterator):
            def __next__(self) -> int:
                return 1

            def get_state(self) -> dict[str, Any]:
                return {"generator": object()}

            def set_state(self, state: dict[str, Any]) -> None:
                pass

        return Iterator()


class Refusing(grain.IterDataset):
    """One whose iterators have no state."""

    def __init__(self, error: type[Exception] | None) -> None:
        super().__init__()
        self._error = error

    def __iter__(self) -> grain.DatasetIterator:
        error = self._error

        class Iterator(grain.DatasetIterator):
            left = 4

            def __next__(self) -> tuple:
                if not self.left:
                    raise StopIteration
                self.left -= 1
                return np.ones((2, 3), np.float32), np.ones((2, 1), np.float32)

            def get_state(self) -> Any:
                if error is not None:
                    raise error("no state")
                return object()

            def set_state(self, state: Any) -> None:
                raise AssertionError("there is none")

        return Iterator()


@pytest.mark.parametrize("error", [NotImplementedError, None], ids=["no state", "no JSON"])
def test_data_without_a_position_are_trained_on(tmp_path: Path, error: type[Exception] | None) -> None:
    """They are saved at the ends of epochs only."""
    seen: list[int] = []
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    backup = tfdist.callbacks.BackupAndRestore(str(tmp_path), save_freq=3, delete_checkpoint=False)
    with pytest.warns(UserWarning, match="ends of epochs only: the state of the Grain iterator cannot be written"):
        model.fit(Refusing(error), epochs=2, verbose=0, callbacks=[backup, watch])
    assert seen == [0, 1, 2, 3] * 2
    assert list(tmp_path.glob("checkpoint-*/manifest.json"))


def test_obstacles() -> None:
    assert RecordedDataset(of_map(Counted())).obstacle is None
    assert RecordedDataset(Stateless()).obstacle == (
        "the state of the Grain iterator cannot be written as JSON (it holds: object); let get_state return such data"
    )
    before = np.random.get_state()[1].tolist()
    drawing = grain.MapDataset.source(Counted()).map(lambda row: row + np.random.rand()).batch(10)
    assert "draws from the global random state" in RecordedDataset(drawing).obstacle
    assert np.random.get_state()[1].tolist() == before
