"""What `tfdist tune` does with a tuner's folders and callbacks, and with a script that ends in the middle."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import keras_tuner
import pytest

from tfdist.tuning.files import ProjectMark, write_search
from tfdist.tuning.member import Member
from tfdist.tuning.patches import Searches, patches

MEMBER = Member(0, 2, "s", "/logs", 3)


def changed(name: str) -> Callable:
    """What makes the changed method of KerasTuner out of the original one."""
    (patch,) = [one for one in patches(Searches(MEMBER)) if one.target.endswith(name)]
    return patch.make


class TestBackups:
    @staticmethod
    def moved(project: Path, folder: str = "/backup") -> SimpleNamespace:
        callback = SimpleNamespace(
            backup_dir=folder, weights=Path("/backup/latest.h5"), beside="/backup-of-mine/x", epoch=3
        )
        tuner, trial = SimpleNamespace(project_dir=str(project)), SimpleNamespace(trial_id="0")
        changed("_configure_tensorboard_dir")(lambda *args: None)(tuner, [callback, object()], trial)
        return callback

    @pytest.mark.parametrize("folder", ["/backup", "/backup/"])
    def test_a_backup_lies_in_a_folder_of_its_project_and_trial(self, tmp_path: Path, folder: str) -> None:
        mark = ProjectMark(tmp_path)
        own = f"/backup/{mark.content['id']}/0/execution0"
        mark.write()
        callback = self.moved(tmp_path, folder)
        assert (callback.backup_dir.rstrip("/"), str(callback.weights)) == (own, f"{own}/latest.h5")
        assert callback.beside == "/backup-of-mine/x" and callback.epoch == 3
        assert self.moved(tmp_path).backup_dir == own


class TestSearch:
    """Of a tuner other than the first."""

    @pytest.fixture
    def tuner(self, tmp_path: Path) -> keras_tuner.RandomSearch:
        return keras_tuner.RandomSearch(lambda hp: None, "loss", 1, directory=str(tmp_path), project_name="p")

    @staticmethod
    def searches(folder: Path, project: str) -> Searches:
        member = Member(1, 2, "s", str(folder), 3)
        write_search(member, 1, project=str(folder / project), over=False)
        return Searches(member)

    @pytest.mark.parametrize(("code", "raised"), [(0, "again"), (None, "again"), (3, 3), ("no data", "no data")])
    def test_a_script_that_leaves_it(
        self, tmp_path: Path, tuner: keras_tuner.RandomSearch, monkeypatch: pytest.MonkeyPatch, code: Any, raised: Any
    ) -> None:
        """Its trial would be at work for ever."""

        def start_again(why: str) -> NoReturn:
            raise SystemExit("again")

        monkeypatch.setattr("tfdist.tuning.patches.start_again", start_again)
        with pytest.raises(SystemExit) as found, self.searches(tmp_path, "p").search(tuner):
            sys.exit(code)
        assert found.value.code == raised

    def test_another_project_is_refused(self, tmp_path: Path, tuner: keras_tuner.RandomSearch) -> None:
        said = rf"Received: the project folder {tmp_path}/p in tuner 1, and {tmp_path}/q in tuner 0"
        with pytest.raises(RuntimeError, match=said), self.searches(tmp_path, "q").search(tuner):
            pass
