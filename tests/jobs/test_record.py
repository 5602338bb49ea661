"""The jobs that are kept as files."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.conftest import SOURCE
from tfdist.jobs.record import Records, new_id
from tfdist.jobs.request import Request, SubmitError
from tfdist.launch.arguments import Target

REQUEST = Request("local", Target("module", ("train", "--epochs", "3")), workers=3, ps=1, name="mine")


def add(records: Records, wanted: str | None = None, **details: object):
    return records.add(REQUEST, records.make_folder("mine"), wanted, **details)


def test_what_is_added_can_be_loaded(tmp_path: Path) -> None:
    records = Records(tmp_path / "jobs")
    record = add(records, state="queued")
    assert records.load("local-1") == record
    assert (record.program, record.workers, record.ps) == (["-m", "train", "--epochs", "3"], 3, 1)
    changed = records.update("local-1", lambda now: now.with_details(state="running", pid=3))
    assert records.load("local-1").details == changed.details == {"state": "running", "pid": 3}


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    records = Records(tmp_path / "jobs")
    record = add(records)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (records.folder, Path(record.folder))]
    assert modes == [0o700, 0o700]
    assert stat.S_IMODE((records.folder / "local-1.json").stat().st_mode) == 0o600


def test_ids_are_unique_and_numbers_go_on(tmp_path: Path) -> None:
    records = Records(tmp_path / "jobs")
    assert [add(records, wanted).id for wanted in (None, None, "7", "7", "7")] == [
        *("local-1", "local-2", "local-7", "local-7-2", "local-7-3"),
    ]
    assert [record.id for record in records.all()] == ["local-1", "local-2", "local-7", "local-7-2", "local-7-3"]
    assert new_id("slurm", None, {"local-9", "slurm-2-3"}) == "slurm-1"


def test_processes_that_submit_at_the_same_time_get_other_ids(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.jobs.test_record import add, Records\n"
        "for _ in range(10): add(Records(Path(sys.argv[1])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "jobs")]
    started = [subprocess.Popen(command, cwd=SOURCE) for _ in range(4)]
    assert [process.wait(60) for process in started] == [0, 0, 0, 0]
    ids = [record.id for record in Records(tmp_path / "jobs").all()]
    assert sorted(ids, key=lambda own: int(own[6:])) == [f"local-{number}" for number in range(1, 41)]


def test_every_job_of_a_second_has_a_folder_of_its_own(tmp_path: Path) -> None:
    records = Records(tmp_path / "jobs")
    assert len({records.make_folder("mine") for _ in range(1000)}) == 1000


@pytest.mark.parametrize("job", ["local-9", "../jobs/local-1", "", "."])
def test_an_unknown_job(tmp_path: Path, job: str) -> None:
    records = Records(tmp_path / "jobs")
    add(records)
    with pytest.raises(SubmitError) as caught:
        records.load(job)
    assert f"Received: job {job!r}" in str(caught.value)
    assert "such as local-1. `tfdist status` lists them; TFDIST_JOBS_DIR names another folder" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"id": "local-2"}', json.dumps({"other": 1})])
def test_a_damaged_record_is_named_and_hides_no_other(tmp_path: Path, text: str) -> None:
    records = Records(tmp_path / "jobs")
    add(records)
    (records.folder / "local-2.json").write_text(text)
    assert [record.id for record in records.all()] == ["local-1"]
    with pytest.raises(SubmitError, match=r"local-2\.json, which is damaged or of another version"):
        records.load("local-2")


def test_the_folder_is_the_variables_or_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Records.of_user({}).folder == tmp_path / ".local/state/tfdist/jobs"
    assert Records.of_user({"TFDIST_JOBS_DIR": "/shared/jobs"}).folder == Path("/shared/jobs")
