"""The commands: what they refuse, and what they do not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tfdist.jobs.record import Records
from tfdist.jobs.request import Request
from tfdist.jobs.status import SUCCEEDED
from tfdist.launcher.arguments import Target
from tfdist.launcher.command import main


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TFDIST_JOBS_DIR", str(tmp_path / "jobs"))
    return tmp_path / "jobs"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit", "--time", "120", "t.py"], ["Received: '120'", "a time such as 2h, 90m"]),
        (["submit", "-n", "0", "t.py"], ["0 is not in the range x>=1"]),
        (["submit", "--ps", "-1", "t.py"], ["-1 is not in the range x>=0"]),
        (["submit", "--scheduler", "pbs", "t.py"], ["'pbs' is not one of 'local', 'slurm', 'kubernetes'"]),
        (["submit", "--transport", "mpi", "t.py"], ["'mpi' is not one of 'auto', 'tensorflow', 'direct', 'horovod'"]),
        (["submit", "--env", "A", "t.py"], ["'A': expected KEY=VALUE"]),
        (["submit", "--volume", "a:/b", "--volume", "a:/c", "t.py"], ["'a:/c': claim a is at /b already"]),
        (["submit", "--volume", "a:b", "t.py"], ["'a:b': expected CLAIM:/PATH", "--volume backups:/backups"]),
        (["logs"], ["Missing argument 'JOB'"]),
    ],
)
def test_usage_errors(arguments: list[str], words: list[str], jobs: Path) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.output
    assert not jobs.exists()


@pytest.mark.parametrize("scheduler", ["local", "slurm", "kubernetes"])
@pytest.mark.parametrize(
    ("options", "env", "chosen"),
    [
        ([], {}, "auto"),
        (["--transport", "horovod"], {}, "horovod"),
        ([], {"TFDIST_TRANSPORT": "horovod"}, "horovod"),
        (["--transport", "tensorflow"], {"TFDIST_TRANSPORT": "horovod"}, "tensorflow"),
        # Then it is that of a launcher around this command.
        ([], {"TFDIST_TRANSPORT": "horovod", "TFDIST_RUN_ID": "7"}, "auto"),
    ],
)
def test_the_transport_is_that_of_tfdist_run(
    scheduler: str, options: list[str], env: dict[str, str], chosen: str, tmp_path: Path
) -> None:
    (tmp_path / "t.py").touch()
    image = ["--image", "x"] if scheduler == "kubernetes" else []
    arguments = ["submit", "--dry-run", "--scheduler", scheduler, *image, *options, "t.py"]
    result = CliRunner().invoke(main, arguments, env=env)
    assert result.exit_code == 0
    printed = result.stdout if scheduler != "kubernetes" else json.dumps(json.loads(result.stdout))
    written = {
        "local": "--transport {}",
        "slurm": "export TFDIST_TRANSPORT={}\n",
        "kubernetes": '"name": "TFDIST_TRANSPORT", "value": "{}"',
    }[scheduler]
    named = scheduler != "local" or chosen != "auto"
    assert printed.count(written.format(chosen)) == named
    assert printed.count("--transport ") + printed.count("TFDIST_TRANSPORT") == named


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["submit"], ["Received: no program", "tfdist submit --scheduler slurm -n 4 train.py"]),
        (["submit", "nowhere.py"], ["nowhere.py: no such script in"]),
        (["submit", "."], [".: a folder without __main__.py", "the path of a Python file, -m MODULE"]),
        (["status", "slurm-3"], ["Received: job 'slurm-3'", "one that `tfdist status` lists"]),
        (["logs", "slurm-3"], ["Received: job 'slurm-3'"]),
        (["cancel", "slurm-3"], ["Received: job 'slurm-3'"]),
    ],
)
def test_errors(arguments: list[str], words: list[str], jobs: Path) -> None:
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    for word in words:
        assert word in result.stderr
    assert not jobs.exists() or [*jobs.iterdir()] == []


def test_ctrl_c_while_a_scheduler_is_asked_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*words: object, **more: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "t.py").touch()
    monkeypatch.setattr("tfdist.jobs.engine.subprocess.run", interrupted)
    result = CliRunner().invoke(main, ["submit", "--scheduler", "slurm", "t.py"])
    kept = "Whether the job runs is not known: `tfdist status slurm-1` shows it once it does"
    assert (result.exit_code, result.stderr) == (1, f"tfdist: interrupted. {kept}\n")


def test_the_status_of_a_job(jobs: Path) -> None:
    request = Request("slurm", Target("script", ("t.py", "--epochs", "3")), ps=1)
    record = Records(jobs).add(request, job="17", cluster="", grace=60, final={"state": SUCCEEDED})
    record.event_log.write_text(json.dumps({"time": 5.0, "name": "chief", "event": "progress", "epoch": 2, "step": 4}))
    assert CliRunner().invoke(main, ["status", "slurm-1"]).output.splitlines() == [
        *("slurm-1  t  succeeded", "  epoch 2, step 4", "  2 workers, 1 parameter server: t.py --epochs 3"),
        *(f"  {record.folder}", "  slurm's job 17"),
    ]
    facts = json.loads(CliRunner().invoke(main, ["status", "--json", "slurm-1"]).output)
    assert (facts["state"], facts["progress"]["step"], facts["job"]) == ("succeeded", 4, "17")


def test_no_jobs(jobs: Path) -> None:
    result = CliRunner().invoke(main, ["status"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"no jobs in {jobs}\n")
    assert CliRunner().invoke(main, ["status", "--json"]).output == "[]\n"
    assert not jobs.exists()


def test_the_last_jobs_or_all(jobs: Path) -> None:
    records, request = Records(jobs), Request("slurm", Target("script", ("t.py",)))
    for number in range(1, 23):
        records.add(request, job=str(number), cluster="", grace=60, final={"state": SUCCEEDED})
    listed = [line.split() for line in CliRunner().invoke(main, ["status"]).output.splitlines()]
    assert listed == [[f"slurm-{number}", "t", "succeeded"] for number in range(3, 23)]
    assert len(CliRunner().invoke(main, ["status", "--all"]).output.splitlines()) == 22


def test_a_folder_of_jobs_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.py").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv("TFDIST_JOBS_DIR", f"{tmp_path}/file/jobs")
    result = CliRunner().invoke(main, ["submit", "t.py"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == f"tfdist: [Errno 20] Not a directory: '{tmp_path}/file/jobs'\n"


def test_options_after_the_script_are_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    result = CliRunner().invoke(main, ["submit", "--dry-run", "-n", "3", "t.py", "--dry-run", "-n", "5"])
    assert result.output.endswith("t.py --dry-run -n 5\n") and " -n 3 " in result.output


@pytest.mark.parametrize(
    ("statement", "loaded"),
    [
        ("import tfdist.launcher.command", []),
        ("import tfdist.jobs.command", ["tfdist.jobs"]),
        ("import tfdist.jobs.local, tfdist.jobs.slurm, tfdist.jobs.kubernetes", ["tfdist.jobs"]),
    ],
)
def test_only_what_is_needed_is_imported(statement: str, loaded: list[str]) -> None:
    names = ("tensorflow", "keras", "numpy", "rich", "tfdist.jobs")
    code = f"import sys\n{statement}\nprint([name for name in {names!r} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout == f"{loaded}\n"
