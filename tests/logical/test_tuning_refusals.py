"""What `tfdist tune` does with a tuner's folders and callbacks, and which strategies it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfdist
from tfdist.cluster.config import ClusterConfig
from tfdist.strategies.validation import check_not_tuned
from tfdist.tuning.member import MEETING, VARIABLE, Meeting, Member
from tfdist.tuning.patches import Searches, patches
from tfdist.tuning.shared_oracle import ProjectMark

MEMBER = Member(0, 0, 2, 1, "a", "s", "/logs", 3, True)
TWO = {"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": {"type": "worker", "index": 0}}


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
        own = f"/backup/{mark.id}/0/execution0"
        mark.write()
        callback = self.moved(tmp_path, folder)
        assert (callback.backup_dir.rstrip("/"), str(callback.weights)) == (own, f"{own}/latest.h5")
        assert callback.beside == "/backup-of-mine/x" and callback.epoch == 3
        assert self.moved(tmp_path).backup_dir == own

    def test_a_project_made_anew_has_another_one(self, tmp_path: Path) -> None:
        mark = ProjectMark(tmp_path)
        assert mark.id == mark.id
        mark.write()
        before = self.moved(tmp_path).backup_dir
        (tmp_path / "tfdist-search.json").unlink()
        assert self.moved(tmp_path).backup_dir != before


def test_a_project_in_a_bucket_is_refused() -> None:
    made = []

    def original(self: object, oracle: object, directory: str | None = None, overwrite: bool = False) -> None:
        made.append(directory)

    init = changed("BaseTuner.__init__")(original)
    with pytest.raises(ValueError, match=r"Received: directory='gs://b/search'\. Expected: a folder on a disk"):
        init(None, None, directory="gs://b/search")
    init(None, None, directory="search")
    init(None, None)
    assert made == ["search", None]


def test_the_folder_of_the_logs_may_be_that_of_the_project(tmp_path: Path) -> None:
    """KerasTuner's oracle.json is another file; and whatever is in ours is read as nothing at worst."""
    assert MEETING != "oracle.json"
    for text in ('{"ongoing_trials": {}}', "[]", "3", '{"hosts": 3}', "{"):
        (tmp_path / MEETING).write_text(text)
        assert Meeting.read(tmp_path, "s") is None
    Meeting("s", port=3).write(tmp_path)
    assert Meeting.read(tmp_path, "s").port == 3


class TestStrategies:
    """One process drives these; the others would serve, and never come to the search."""

    @pytest.mark.parametrize("strategy", [tfdist.ParameterServerStrategy, tfdist.PipelineStrategy])
    def test_several_processes_are_refused(self, strategy: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(VARIABLE, MEMBER.to_json())
        with pytest.raises(tfdist.ClusterError, match=f"Received: {strategy.__name__} in `tfdist tune`"):
            strategy(cluster=ClusterConfig.from_tf_config(TWO))

    def test_otherwise_nothing_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        check_not_tuned("PipelineStrategy", ClusterConfig.from_tf_config(TWO))
        monkeypatch.setenv(VARIABLE, MEMBER.to_json())
        check_not_tuned("PipelineStrategy", ClusterConfig.from_tf_config({}))
