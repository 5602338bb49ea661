"""What `tfdist tune` works out before anything is started, and what it shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner

from tests.unit.pages import blocks_of
from tfdist.cluster.config import ClusterConfig
from tfdist.jobs.run_state import RunState, search_in_words
from tfdist.launcher.command import main
from tfdist.launcher.plan import Machine, PlanError, ProcessPlan, RunOptions
from tfdist.plain_text import plain_text
from tfdist.tuning.files import searches_in, write_search
from tfdist.tuning.member import VARIABLE, Member, plan_tuners
from tfdist.tuning.tune_run import summary_of, table_of

MEMBER = Member(0, 2, "s", "/logs", 3)


def plans(machine: Machine, shares: RunOptions | None = None, **environ: str) -> dict[int, ProcessPlan]:
    return plan_tuners((0, 1), shares or RunOptions(2), ["python", "s.py"], machine, environ, MEMBER)


class TestPlan:
    def test_cores_and_gpus_are_shared_out(self) -> None:
        found = plans(Machine((0, 1, 2, 3), ("0", "1"))).values()
        assert [plan.cpus for plan in found] == [(0, 1), (2, 3)]
        assert [plan.env["CUDA_VISIBLE_DEVICES"] for plan in found] == ["0", "1"]
        assert [plan.name for plan in found] == ["tuner 0", "tuner 1"]
        assert [Member.of_process(plan.env).tuner for plan in found] == [0, 1]

    def test_each_tuner_is_alone(self) -> None:
        found = plans(Machine((0,)), TF_CONFIG="a", KERASTUNER_ORACLE_IP="b", SLURM_JOB_ID="17")
        for plan in found.values():
            assert not {"TF_CONFIG", "KERASTUNER_ORACLE_IP"} & {*plan.env} and plan.env["SLURM_JOB_ID"] == "17"
            assert plan.env["TFDIST_CLUSTER"] == ClusterConfig.single_process().to_json()

    def test_too_many_are_refused(self) -> None:
        with pytest.raises(PlanError, match="--cpus-per-worker 2: 2 processes need 4 cores, but 2 are usable here"):
            plans(Machine((0, 1)), RunOptions(2, cpus_per_worker=2))

    @pytest.mark.parametrize("name", ["KERASTUNER_TUNER_ID", VARIABLE])
    def test_its_own_variables_are_refused(self, name: str) -> None:
        with pytest.raises(PlanError, match=f"--env {name}=...: tfdist tune sets it"):
            plans(Machine((0, 1)), RunOptions(2, env={name: "x"}))


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "Example: tfdist tune -n 2 search.py"),
            (["no-such.py"], "no such script"),
            (["--", "bash", "x.sh"], "expected a Python file or -m MODULE"),
            (["-n", "0", "x.py"], "0 is not in the range"),
            (["--only", "1", "x.py"], "--only 1: expected -n, more than 1, and --log-dir"),
            (["-n", "2", "--only", "2", "--log-dir", "logs", "x.py"], "--only 2: expected -n, more than 2"),
        ],
    )
    def test_mistakes(self, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "x.py").touch()
        result = CliRunner().invoke(main, ["tune", *words])
        assert result.exit_code == 2 and message in result.output


def trial(name: str, **more: Any) -> dict[str, Any]:
    given = {"trial": name, "status": "COMPLETED", "score": 0.5, "hyperparameters": {"a": 1}}
    return {**given, "error": None, **more}


class TestResults:
    def test_trials_that_failed_say_why(self) -> None:
        failed = trial("1", status="FAILED", score=None, error="Traceback\nValueError: no luck in [/data]\n")
        search = {"objective": "loss", "over": True, "project": "p", "trials": [trial("0"), failed]}
        text = plain_text(table_of(search), width=120)
        assert "failed: ValueError: no luck in [/data]" in text and "Traceback" not in text
        assert summary_of(search) == "search finished: 2 trials, 1 failed; p"

    def test_only_what_this_search_has_written_counts(self, tmp_path: Path) -> None:
        member = Member(0, 2, "s", str(tmp_path), 3)
        for number in (2, 1):
            write_search(member, number, trials=[])
        (tmp_path / "tfdist-search-3.json").write_text('[{"search_id": "s"}]')
        assert [search["number"] for search in searches_in(tmp_path, "s")] == [1, 2]
        assert searches_in(tmp_path, "another") == []


def test_a_second_search_begins_at_nothing() -> None:
    run, counts = RunState(), {"done": 2, "running": 0, "best": 0.5, "best_trial": "1"}

    def shown(event: str, **more: Any) -> str:
        run.add({"time": 1.0, "name": "tuner 0", "event": event, **more})
        return search_in_words(run.search)

    shown("search", objective="loss", max_trials=2)
    assert shown("searched", counts=counts) == "2 of 2 trials done, 0 running; best loss 0.5 (trial 1)"
    assert shown("search", objective="accuracy", max_trials=3) == "0 of 3 trials done, 0 running"
    # The oracle's process was started again, and says what it knows.
    known = shown("search", objective="loss", counts=counts)
    assert known == shown("trial", counts=[]) == "2 trials done, 0 running; best loss 0.5 (trial 1)"
    assert shown("trial", counts={"best": float("nan")}) == "2 trials done, 0 running"


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
def test_the_manifest_of_the_guide_is_valid(version: str) -> None:
    (block,) = blocks_of("docs/tuning.md", "yaml")
    manifest = yaml.safe_load(block.text)
    kubernetes_validate.validate(manifest, version, strict=True)
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert f"-n {manifest['spec']['completions']} --only $JOB_COMPLETION_INDEX" in container["command"][2]
    manifest["spec"]["completionModes"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, version, strict=True)
