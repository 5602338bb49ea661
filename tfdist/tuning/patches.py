"""What `tfdist tune` changes in KerasTuner, in the processes of a search only."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
from keras_tuner.engine.base_tuner import BaseTuner
from keras_tuner.engine.trial import Trial
from keras_tuner.oracles import GridSearchOracle

from tfdist.atomic_files import write_atomically
from tfdist.compat.patch import Patch, inherited
from tfdist.supervision.exit_codes import PREEMPTED
from tfdist.tuning.files import ProjectMark, hold, read_search, turn_of
from tfdist.tuning.member import Member
from tfdist.tuning.shared_oracle import PAUSE, SharedOracle, start_again

_BASE = "keras_tuner.engine.base_tuner:BaseTuner"
# Under this key the place in a grid stands in the state of its oracle.
_GRID = "tfdist_grid"


class Searches:
    """The searches of a script, one after the other, in one process.

    Args:
        member: this process.
    """

    def __init__(self, member: Member) -> None:
        self.member = member
        self._number = 0

    @contextlib.contextmanager
    def search(self, tuner: BaseTuner) -> Iterator[None]:
        """While a tuner searches, its oracle is shared with the other processes."""
        self._number += 1
        member, number, project = self.member, self._number, Path(tuner.project_dir).absolute()
        oracle, tuner.tuner_id = tuner.oracle, member.id
        shared = SharedOracle(oracle, member, number, project)
        if not member.tuner:
            # KerasTuner writes its tuner's file after a trial only, and without it reads none of the others.
            shared.begin(tuner.save)
        elif (begun := self._wait_for(number)["project"]) != str(project):
            raise RuntimeError(
                f"Received: the project folder {project} in {member.name}, and {begun} in tuner 0. Expected: the same "
                "folder in all processes, on a disk that all of them see. Give the tuner a fixed directory= and "
                "project_name=, without random parts, dates or tempfile"
            )
        tuner.oracle = shared
        try:
            yield
            if member.tuner:
                self._wait_for(number + 1)
            shared.get_best_trials(1)  # the script may ask its oracle: it knows all now
        except SystemExit as error:
            if error.code == PREEMPTED:
                shared.spare()
            elif not error.code:
                start_again("its script has called sys.exit() in the middle of the search")
            raise
        finally:
            tuner.oracle = oracle
            if not member.tuner:
                shared.close()

    def may_overwrite(self, project: Path) -> bool:
        """Whether a tuner may begin its project from nothing: not if this is a further start, or a further tuner."""
        may = not self.member.tuner and not ProjectMark(project).is_of(self.member.search_id, self._number + 1)
        if may:
            hold(project)  # before all that is there is removed
        return may

    def _wait_for(self, number: int) -> dict[str, Any]:
        """What is known of a search, once tuner 0 has begun it. If it never does, the launcher ends this process."""
        while (search := read_search(Path(self.member.folder), self.member.search_id, number)) is None:
            time.sleep(PAUSE)
        return search


def _grid_state(original: Callable | None) -> Callable:
    """A grid search that saves where it is in its grid."""

    def get_state(self: GridSearchOracle) -> dict[str, Any]:
        state = super(GridSearchOracle, self).get_state()
        ids, order = self._ordered_ids, []
        place = ids._next_index[None]
        while place is not None:
            order.append(ids._memory[place])
            place = ids._next_index[place]
        return {**state, _GRID: {"order": order, "next": list(self._populate_next)}}

    return get_state


def _set_grid_state(original: Callable | None) -> Callable:
    def set_state(self: GridSearchOracle, state: dict[str, Any]) -> None:
        super(GridSearchOracle, self).set_state(state)
        found = state.get(_GRID, {"order": [], "next": []})
        self._populate_next = list(found["next"])
        self._ordered_ids, before = type(self._ordered_ids)(), None
        for trial_id in found["order"]:
            self._ordered_ids.insert(trial_id, before)
            before = trial_id

    return set_state


# A grid search that is reloaded has forgotten its place, and ends.
GRID_PATCHES = (
    Patch("keras_tuner.oracles:GridSearchOracle.get_state", _grid_state, "keras_tuner", "not saved", is_new=True),
    Patch("keras_tuner.oracles:GridSearchOracle.set_state", _set_grid_state, "keras_tuner", "not saved", is_new=True),
)


def patches(searches: Searches) -> tuple[Patch, ...]:
    """The changes."""

    def init(original: Callable) -> Callable:
        @functools.wraps(original)
        def __init__(
            self: BaseTuner,
            oracle: Any,
            hypermodel: Any = None,
            directory: Any = None,
            project_name: str | None = None,
            overwrite: bool = False,
            **kwargs: Any,
        ) -> None:
            if overwrite:
                project = Path(directory or ".", project_name or "untitled_project")
                overwrite = searches.may_overwrite(project)
            original(self, oracle, hypermodel, directory, project_name, overwrite, **kwargs)

        return __init__

    def search(original: Callable) -> Callable:
        @functools.wraps(original)
        def search(self: BaseTuner, *args: Any, **kwargs: Any) -> Any:
            self.oracle.verbose = kwargs.get("verbose", self.oracle.verbose)
            with searches.search(self):
                return original(self, *args, **kwargs)

        return search

    def reload(original: Callable) -> Callable:
        @functools.wraps(original)
        def reload(self: BaseTuner) -> None:
            if searches.member.tuner:  # another process may be writing, or removing, the oracle's files
                self.set_state(json.loads(Path(self._get_tuner_fname()).read_bytes()))
                return
            try:
                with turn_of(searches.member):
                    original(self)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                raise RuntimeError(
                    f"Received: the project folder {self.project_dir}, in which a file of KerasTuner is not whole, as "
                    f"after a power failure: {error}. Expected: the project as a search has left it. Restore it, or "
                    "give the tuner overwrite=True"
                ) from error

        return reload

    def save(original: Callable) -> Callable:
        @functools.wraps(original)
        def save(self: Any, fname: str) -> str:
            text = json.dumps(self.get_state())
            write_atomically(fname, text)
            return text

        return save

    def folders(original: Callable) -> Callable:
        @functools.wraps(original)
        def _configure_tensorboard_dir(
            self: BaseTuner, callbacks: list[keras.callbacks.Callback], trial: Trial, execution: int = 0
        ) -> Any:
            project = ProjectMark(Path(self.project_dir)).content["id"]
            for callback in callbacks:
                if hasattr(callback, "backup_dir"):
                    # Trials of each project are numbered from 0: a backup of an earlier one must not be taken up.
                    of_trial = (project, str(trial.trial_id), f"execution{execution}")
                    _move(callback, os.path.join(callback.backup_dir, *of_trial))
            return original(self, callbacks, trial, execution)

        return _configure_tensorboard_dir

    issue = "keras-tuner issue 915"
    return (
        Patch(f"{_BASE}.__init__", init, "keras_tuner", issue),
        Patch(f"{_BASE}.search", search, "keras_tuner", issue),
        Patch(f"{_BASE}.reload", reload, "keras_tuner", "keras-tuner issue 976"),
        Patch(inherited(Trial, "save"), save, "keras_tuner", "it writes a file piece by piece"),
        *GRID_PATCHES,
        Patch("keras_tuner:Tuner._configure_tensorboard_dir", folders, "keras_tuner", "one backup for all trials"),
    )


def _move(callback: Any, folder: str) -> None:
    """Gives a BackupAndRestore, Keras' or tfdist's, another folder: all its paths lie in that."""
    before = str(callback.backup_dir).rstrip(os.sep)
    for name, value in list(vars(callback).items()):
        is_path = isinstance(value, (str, os.PathLike))
        if is_path and (str(value) == before or str(value).startswith(before + os.sep)):
            setattr(callback, name, folder + str(value)[len(before) :])
