"""What `tfdist tune` works out before anything is started, and what it shows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from tests.unit.pages import blocks_of
from tfdist.launcher.command import main
from tfdist.launcher.machine import Machine
from tfdist.launcher.run_plan import PlanError
from tfdist.plain_text import plain_text
from tfdist.supervision.search_state import SearchState
from tfdist.tuning.member import VARIABLE, Member
from tfdist.tuning.placement import place
from tfdist.tuning.results import SearchFile, files_in, searches_in, summary_of, table_of
from tfdist.tuning.tune_plan import TuneOptions, plan_tuners

ARRAY = {
    **{"SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "4"},
    **{"SLURM_ARRAY_TASK_MIN": "4", "SLURM_ARRAY_TASK_MAX": "7"},
}
POD = {"JOB_COMPLETION_INDEX": "2", "TFDIST_SEARCH_ID": "uid"}
FIRST = Member(0, 0, 2, 1, "a", "s", "/logs", 3, True)


def plans(options: TuneOptions, machine: Machine, ports: tuple[int, ...] = (), **environ: str) -> dict:
    return plan_tuners(options, ["python", "s.py"], machine, ports, environ, FIRST)


class TestPlan:
    def test_cores_and_gpus_are_shared_out(self) -> None:
        found = plans(TuneOptions(2, (0, 1)), Machine((0, 1, 2, 3), ("0", "1")))
        assert [plan.cpus for one in found.values() for plan in one] == [(0, 1), (2, 3)]
        assert [plan.env["CUDA_VISIBLE_DEVICES"] for one in found.values() for plan in one] == ["0", "1"]
        assert [plan.name for one in found.values() for plan in one] == ["tuner 0", "tuner 1"]

    def test_each_tuner_is_a_cluster_of_its_own(self) -> None:
        options = TuneOptions(2, (0, 1), workers_per_trial=2)
        found = plans(options, Machine((0, 1, 2, 3)), ports=(1, 2, 3, 4))
        assert "127.0.0.1:3" in found[1][0].env["TF_CONFIG"] and "127.0.0.1:1" not in found[1][0].env["TF_CONFIG"]
        members = [Member.of_process(plan.env) for one in found.values() for plan in one]
        assert [(one.tuner, one.rank) for one in members] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [one.keeps_oracle for one in members] == [True, False, False, False]

    def test_what_is_around_is_not_inherited(self) -> None:
        around = {"TF_CONFIG": "{}", "KERASTUNER_ORACLE_IP": "10.0.0.1", "HOME": "/home/me"}
        env = plans(TuneOptions(1, (0,)), Machine((0,)), **around)[0][0].env
        assert "TF_CONFIG" not in env and "KERASTUNER_ORACLE_IP" not in env and env["HOME"] == "/home/me"

    def test_a_further_start_is_another_attempt(self) -> None:
        env = {**plans(TuneOptions(1, (0,)), Machine((0,)))[0][0].env}
        first = Member.of_process(env)
        second = Member.of_process({**env, "TFDIST_REPLACEMENT": "1"})
        assert first.attempt != second.attempt

    def test_too_many_are_refused(self) -> None:
        with pytest.raises(PlanError, match="--cpus-per-worker 2: 4 processes need 8 cores, but 2 are usable here"):
            plans(TuneOptions(2, (0, 1), workers_per_trial=2, cpus_per_worker=2), Machine((0, 1)), ports=(1, 2, 3, 4))

    @pytest.mark.parametrize("name", ["TF_CONFIG", "KERASTUNER_TUNER_ID", VARIABLE])
    def test_its_own_variables_are_refused(self, name: str) -> None:
        with pytest.raises(PlanError, match=f"--env {name}=...: tfdist tune sets {name}"):
            TuneOptions(1, (0,), env={name: "x"})


class TestPlace:
    def test_an_element_of_an_array(self) -> None:
        found = place("slurm", None, None, "", ARRAY)
        assert (found.tuners, found.here, found.search_id, found.folder.name) == (4, (1,), "slurm-17", "tune-17")

    def test_a_pod_of_an_indexed_job(self) -> None:
        found = place("kubernetes", 4, "/shared/logs", "", POD)
        assert (found.tuners, found.here, found.search_id) == (4, (2,), "kubernetes-uid")

    @pytest.mark.parametrize(
        ("arguments", "env", "message"),
        [
            (("slurm", None, None), {}, "expected an element of a job array"),
            (("slurm", 3, None), ARRAY, "-n 3: the job array has 4 elements"),
            (("slurm", None, None), {**ARRAY, "SLURM_ARRAY_TASK_MAX": "10"}, "Expected: one after the other"),
            (("kubernetes", 4, "/logs"), {}, "JOB_COMPLETION_INDEX"),
            (("kubernetes", None, "/logs"), POD, "-n is missing"),
            (("kubernetes", 4, None), POD, "--log-dir is missing"),
            (("kubernetes", 4, "/logs"), {"JOB_COMPLETION_INDEX": "1"}, "TFDIST_SEARCH_ID is missing"),
            (("kubernetes", 2, "/logs"), POD, "this pod has the index 2"),
        ],
    )
    def test_what_does_not_fit(self, arguments: tuple, env: dict[str, str], message: str) -> None:
        with pytest.raises(PlanError, match=message):
            place(*arguments, "", env)


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "Example: tfdist tune -n 2 search.py"),
            (["no-such.py"], "no such script"),
            (["--", "bash", "x.sh"], "expected a Python file or -m MODULE"),
            (["-n", "0", "x.py"], "0 is not in the range"),
        ],
    )
    def test_mistakes(self, words: list[str], message: str) -> None:
        result = CliRunner().invoke(main, ["tune", *words])
        assert result.exit_code == 2 and message in result.output

    def test_without_keras_tuner(self, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
        (tmp_path / "x.py").touch()
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        result = CliRunner().invoke(main, ["tune", str(tmp_path / "x.py")])
        assert result.exit_code == 2 and "pip install keras-tuner" in result.output


def trial(name: str, **more: Any) -> dict[str, Any]:
    given = {"trial": name, "status": "COMPLETED", "score": 0.5, "seconds": 2.0, "hyperparameters": {"a": 1}}
    return {**given, "error": None, **more}


class TestResults:
    def test_trials_that_failed_say_why(self) -> None:
        failed = trial("1", status="FAILED", score=None, error="Traceback\nValueError: no luck\n")
        search = {"objective": "loss", "over": True, "project": "p", "trials": [trial("0"), failed]}
        text = plain_text(table_of(search), width=120)
        assert "failed: ValueError: no luck" in text and "Traceback" not in text
        assert summary_of(search) == "search finished: 2 trials, 1 of them failed; p"

    def test_conditional_hyperparameters(self) -> None:
        search = {"objective": "loss", "trials": [trial("0"), trial("1", hyperparameters={"b": 0.25})]}
        rows = plain_text(table_of(search)).splitlines()
        assert rows[0].split()[-2:] == ["a", "b"] and rows[-1].split()[-2:] == ["-", "0.25"]

    def test_a_score_that_is_not_finite(self) -> None:
        odd = trial("0", score=None, error="the score is inf")
        text = plain_text(table_of({"objective": "loss", "trials": [odd]}), width=120)
        assert "completed: the score is inf" in text

    def test_only_files_of_tfdist_are_its(self, tmp_path: Path) -> None:
        for name in ("search-1.json", "tfdist-search.json", "tfdist-search-space.json", "search-space.json"):
            (tmp_path / name).write_text("[]")
        for number in (2, 1):
            SearchFile(tmp_path, number, tmp_path / "p").write(True, [])
        assert sorted(path.name for path in files_in(tmp_path)) == ["tfdist-search-1.json", "tfdist-search-2.json"]
        assert [search["number"] for search in searches_in(tmp_path)] == [1, 2]

    def test_ten_are_shown(self) -> None:
        search = {"objective": "loss", "trials": [trial(str(name)) for name in range(30)]}
        assert len(plain_text(table_of(search)).strip().splitlines()) == 12


class TestSearchState:
    def test_a_second_search_begins_at_nothing(self) -> None:
        search = SearchState()
        search.add({"time": 1.0, "name": "tuner 0", "event": "search", "objective": "loss", "max_trials": 2})
        counts = {"done": 2, "running": 0, "best": 0.5, "best_trial": "1"}
        search.add({"time": 2.0, "name": "tuner 0", "event": "searched", "counts": counts})
        search.add({"time": 3.0, "name": "tuner 0", "event": "search", "objective": "accuracy", "max_trials": 3})
        assert search.shown() == "0 of 3 trials done, 0 running"
        # The oracle's process was started again, and says what it knows.
        search.add({"time": 4.0, "name": "tuner 0", "event": "search", "objective": "loss", "counts": counts})
        assert search.shown() == "2 trials done, 0 running; best loss 0.5 (trial 1)"

    def test_damaged_events_change_nothing(self) -> None:
        search = SearchState()
        search.add({"time": 1.0, "name": "tuner 0", "event": "trial", "counts": {"done": 2, "best": 0.5}})
        before = search.shown()
        for counts in (None, [], {"done": "3"}, {"done": -1}, {"done": True}, {"best": float("nan")}, {"best": "x"}):
            search.add({"time": 1.0, "name": "tuner 0", "event": "trial", "counts": counts})
        assert search.shown() == before == "2 trials done, 0 running; best score 0.5 (trial None)"


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_the_manifest_of_the_guide_is_valid(version: str) -> None:
    (block,) = blocks_of("docs/tuning.md", "yaml")
    manifest = yaml.safe_load(block.text)
    kubernetes_validate.validate(manifest, version, strict=True)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    words = container["command"]
    assert words[words.index("-n") + 1] == str(manifest["spec"]["completions"])
    assert container["env"][0]["name"] == "TFDIST_SEARCH_ID"
    manifest["spec"]["completionModes"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, version, strict=True)
