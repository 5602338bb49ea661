"""Grain datasets that tell where they are after each batch, and begin where they are told.

Only what has imported Grain needs this module, which imports it, too.

Keras turns a Grain dataset into a `tf.data` one, which reads ahead. So the states of its iterators are noted when
elements are read, under the number of elements read until then; a backup takes the one of the batch that was trained
on last. Grain's state is a position, not data: nothing that was consumed is read again.
"""

from __future__ import annotations

import json
from typing import Any

import grain

from tfdist.inspection import random_state

# Grain compares these representations. Many contain the address of the object, which another process has elsewhere.
_REPRESENTATIONS = ("sampler", "data_source")
_ADDRESS = " at 0x"
_DRAWS = (
    "a transformation of the Grain dataset draws from the global random state of Python, NumPy or TensorFlow; use "
    "grain.transforms.RandomMap, or random_map, which are given a generator"
)


class RecordedDataset(grain.IterDataset):
    """A Grain dataset, as it was, whose iterators note their states.

    Args:
        dataset: a `grain.MapDataset`, `grain.IterDataset` or `grain.DataLoader` of batches.

    Attributes:
        obstacle: why no position in it can be found again; `None` if it can.
    """

    def __init__(self, dataset: Any) -> None:
        super().__init__()
        self._dataset = dataset
        self._start: tuple[int, str | None] = (0, None)
        self._states: dict[int, str] = {}
        self.obstacle = self._find_obstacle()

    def _find_obstacle(self) -> str | None:
        before = random_state.capture()
        # In this thread alone where that is possible: others would go on to draw.
        if isinstance(self._dataset, grain.MapDataset):
            self._dataset[0]
            iterator = iter(self._dataset)
        else:
            iterator = iter(self._dataset)
            next(iterator, None)
        drawn = random_state.capture() != before
        if drawn:
            random_state.restore(before)
        try:
            _state_of(iterator)
        except (TypeError, ValueError, AttributeError, NotImplementedError) as error:
            return (
                f"the state of the Grain iterator cannot be written as JSON ({error}); let get_state return such data"
            )
        finally:
            _close(iterator)
        return _DRAWS if drawn else None

    def begin_at(self, taken: int, state: str) -> None:
        """Lets the next iterator begin after `taken` elements, in the state that `state_after` returned."""
        self._start = taken, state
        self._states = {taken: state}

    def state_after(self, taken: int) -> str:
        """The state of the last iterator after so many elements, as JSON."""
        # More are counted than there were if the data have ended within an execution of several steps.
        return self._states[max(number for number in list(self._states) if number <= taken)]

    def forget_before(self, taken: int) -> None:
        """Forgets the states before the one after `taken` elements."""
        kept = max((number for number in list(self._states) if number <= taken), default=0)
        for number in list(self._states):
            if number < kept:
                del self._states[number]

    def check(self, state: str) -> None:
        """Tries whether the dataset takes a state.

        Raises:
            ValueError: it does not: the state is of another dataset.
        """
        iterator = iter(self._dataset)
        try:
            _set_state(iterator, state)
        except Exception as error:  # whatever Grain, or a dataset of the user's, makes of it
            raise ValueError(
                "The backup was made within an epoch of other data. Received: a Grain dataset that does not take the "
                f"saved position: {error}. Expected: the same dataset as before; or pass another backup_dir to begin "
                "anew."
            ) from error
        finally:
            _close(iterator)

    def __iter__(self) -> grain.DatasetIterator:
        (taken, state), self._start = self._start, (0, None)
        iterator = iter(self._dataset)
        if state is not None:
            _set_state(iterator, state)
        self._states = {taken: _state_of(iterator)}
        return _Recorded(iterator, taken, self._states)

    def __str__(self) -> str:
        return f"RecordedDataset({self._dataset})"


class _Recorded(grain.DatasetIterator):
    """An iterator that notes the state of another one after each element.

    Args:
        iterator: the other one.
        taken: how many elements were taken before it began.
        states: where the states go, by the number of elements.
    """

    def __init__(self, iterator: Any, taken: int, states: dict[int, str]) -> None:
        super().__init__()
        self._iterator, self._taken, self._states = iterator, taken, states

    def __next__(self) -> Any:
        element = next(self._iterator)
        self._taken += 1
        self._states[self._taken] = _state_of(self._iterator)
        return element

    def get_state(self) -> dict[str, Any]:
        return {"state": _state_of(self._iterator)}

    def set_state(self, state: dict[str, Any]) -> None:
        _set_state(self._iterator, state["state"])

    def close(self) -> None:
        _close(self._iterator)


def _state_of(iterator: Any) -> str:
    """Grain's iterators return what JSON can hold, those of a DataLoader the bytes of it."""
    state = iterator.get_state()
    return json.dumps(json.loads(state) if isinstance(state, bytes) else state, default=_plain)


def _plain(number: Any) -> Any:
    """What JSON can hold of a NumPy number.

    Raises:
        TypeError: it is none.
    """
    if not hasattr(number, "item"):
        raise TypeError(f"it holds: {type(number).__name__}")
    return number.item()


def _set_state(iterator: Any, state: str) -> None:
    saved, now = json.loads(state), iterator.get_state()
    if not isinstance(now, bytes):
        iterator.set_state(saved)
        return
    own = json.loads(now)
    saved.update({name: own[name] for name in _REPRESENTATIONS if _ADDRESS in str(own.get(name))})
    iterator.set_state(json.dumps(saved).encode())


def _close(iterator: Any) -> None:
    """Ends the processes of an iterator that has some. Not every release of Grain can."""
    if hasattr(iterator, "close"):
        iterator.close()
