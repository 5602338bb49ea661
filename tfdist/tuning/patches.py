"""What `tfdist tune` changes in KerasTuner, in the processes of a search only."""

from __future__ import annotations

import contextlib
import functools
import inspect
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
from tfdist.tuning.client import PAUSE, OracleClient, Remote, SearchEndedError
from tfdist.tuning.member import Member
from tfdist.tuning.service import OracleService
from tfdist.tuning.shared_oracle import ProjectMark, SharedOracle, set_state

_BASE = "keras_tuner.engine.base_tuner:BaseTuner"
_SAME_PROJECT_SECONDS = 60.0
# Under this key the place in a grid stands in the state of its oracle.
_GRID = "tfdist_grid"


class Searches:
    """The searches of a script, one after the other, in one process.

    Args:
        member: this process.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._number = 0
        self._service: OracleService | None = None

    @contextlib.contextmanager
    def search(self, tuner: BaseTuner) -> Iterator[None]:
        """While a tuner searches, its oracle is shared with the other processes."""
        self._number += 1
        oracle, tuner.tuner_id = tuner.oracle, self._member.id
        if self._member.keeps_oracle:
            yield from self._keep(tuner)
        else:
            tuner.oracle = client = OracleClient(oracle, self._member, self._number, Remote(self._member))
            client.wait_for_search(self._number)
            self._check_project(Path(tuner.project_dir))
            yield
            if self._member.tuner:
                client.wait_for_search(self._number + 1)
            tuner.oracle = oracle
            set_state(oracle, client.state())
            if not self._member.tuner:
                client.leave()

    def may_overwrite(self, project: Path) -> bool:
        """Whether a tuner may begin its project anew: not if this is a further start, or a further tuner."""
        mark = ProjectMark(project)
        return self._member.keeps_oracle and not mark.is_of(self._member.search_id, self._number + 1)

    @property
    def reloads(self) -> bool:
        """Whether a tuner that is made reads its oracle's files, which another process may be writing."""
        return self._member.keeps_oracle

    def _keep(self, tuner: BaseTuner) -> Iterator[None]:
        oracle = tuner.oracle
        self._service = self._service or OracleService(self._member)
        shared = SharedOracle(oracle, self._member, self._number, Path(tuner.project_dir).absolute())
        # KerasTuner writes this file after a trial only, and without it reads none of the others.
        tuner.save()
        self._service.open(shared)
        tuner.oracle = OracleClient(oracle, self._member, self._number, self._service.answer)
        try:
            yield
            self._service.wait_for_processes()
        except SearchEndedError:
            assert shared.failure is not None
            raise shared.failure from None
        finally:
            tuner.oracle = oracle
            shared.close()

    def _check_project(self, project: Path) -> None:
        """Sees that the tuners write to the same folder: the search would go on, but lack the others' models.

        Raises:
            RuntimeError: they do not.
        """
        deadline = time.monotonic() + _SAME_PROJECT_SECONDS  # a network file system may show it late
        while not ProjectMark(project).is_of(self._member.search_id, self._number):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"Received: the project folder {project.absolute()} in {self._member.name}, in which tuner 0 has "
                    "not begun this search. Expected: the same folder in all processes, on a disk that all of them "
                    "see. Give the tuner a fixed directory= and project_name=, without random parts, dates or tempfile"
                )
            time.sleep(PAUSE)


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
        before = None
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
        signature = inspect.signature(original)

        @functools.wraps(original)
        def __init__(self: BaseTuner, *args: Any, **kwargs: Any) -> None:
            called = signature.bind(self, *args, **kwargs)
            _check_folder(called.arguments.get("directory"))
            if called.arguments.get("overwrite"):
                folder, name = called.arguments.get("directory") or ".", called.arguments.get("project_name")
                project = Path(str(folder), name or "untitled_project")
                called.arguments["overwrite"] = searches.may_overwrite(project)
            original(*called.args, **called.kwargs)

        return __init__

    def search(original: Callable) -> Callable:
        @functools.wraps(original)
        def search(self: BaseTuner, *args: Any, **kwargs: Any) -> Any:
            with searches.search(self):
                return original(self, *args, **kwargs)

        return search

    def reload(original: Callable) -> Callable:
        @functools.wraps(original)
        def reload(self: BaseTuner) -> None:
            if searches.reloads:
                original(self)
            else:
                self.set_state(json.loads(Path(self._get_tuner_fname()).read_bytes()))

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
            project = ProjectMark(Path(self.project_dir)).id
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


def install(member: Member) -> None:
    """Changes KerasTuner in this process.

    Raises:
        RuntimeError: what is to be changed is not there in this version.
    """
    for patch in patches(Searches(member)):
        patch.install()


def _check_folder(directory: Any) -> None:
    """Checks where a tuner's project is to be.

    Raises:
        ValueError: not on a disk.
    """
    if "://" in str(directory):
        raise ValueError(
            f"Received: directory={str(directory)!r}. Expected: a folder on a disk that all processes of `tfdist tune` "
            "see, in which a file can be replaced in one piece. Give the tuner such a folder, and copy it afterwards"
        )


def _move(callback: Any, folder: str) -> None:
    """Gives a BackupAndRestore, Keras' or tfdist's, another folder: all its paths lie in that."""
    before = str(callback.backup_dir).rstrip(os.sep)
    for name, value in list(vars(callback).items()):
        is_path = isinstance(value, (str, os.PathLike))
        if is_path and (str(value) == before or str(value).startswith(before + os.sep)):
            setattr(callback, name, folder + str(value)[len(before) :])
