"""The jobs that are kept as files."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.jobs.conftest import SOURCE
from tfdist.jobs.local import LocalEngine
from tfdist.jobs.record import Record, Records
from tfdist.jobs.request import Request, SubmitError
from tfdist.launcher.arguments import Target
from tfdist.supervision.identity import Identity, this_host

REQUEST = Request("local", Target("module", ("train", "--epochs", "3")), workers=3, ps=1, name="mine")
LOCAL = {"host": this_host(), "grace": 60, "process": None}


def add(records: Records, **details: object) -> Record:
    return records.add(REQUEST, **{**LOCAL, **details})


def test_what_is_added_can_be_loaded_by_its_owner(tmp_path: Path) -> None:
    records = Records(tmp_path / "jobs")
    record = add(records)
    assert records.load("local-1") == record
    assert (record.program, record.workers, record.ps) == (["-m", "train", "--epochs", "3"], 3, 1)
    changed = records.update("local-1", grace=3)
    assert records.load("local-1").details == changed.details == {**LOCAL, "grace": 3}
    assert add(records).id == "local-2" and [one.id for one in records.all()[0]] == ["local-1", "local-2"]
    paths = (records.folder, Path(record.folder), Path(record.folder, "job.json"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o700, 0o600]


def test_processes_at_the_same_time_get_other_ids_and_lose_no_change(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.jobs.test_record import add, Records\n"
        "records, name = Records(Path(sys.argv[1])), sys.argv[2]\n"
        "for number in range(1, 21):\n"
        "    add(records)\n"
        "    value = {'grace': number, 'cancelled': number % 2 == 1}[name]\n"
        "    records.update('local-1', **{name: value})\n"
        "    assert records.load('local-1').details[name] == value"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "jobs")]
    started = [subprocess.Popen([*command, name], cwd=SOURCE) for name in ("grace", "cancelled")]
    assert [process.wait(60) for process in started] == [0, 0]
    ids = [record.id for record in Records(tmp_path / "jobs").all()[0]]
    assert sorted(ids, key=lambda own: int(own[6:])) == [f"local-{number}" for number in range(1, 41)]


@pytest.mark.parametrize("job", ["local-9", "../jobs/local-1", "", "."])
def test_an_unknown_job(tmp_path: Path, job: str) -> None:
    records = Records(tmp_path / "jobs")
    add(records)
    with pytest.raises(SubmitError, match=f"Received: job '{job}', which is not in .*TFDIST_JOBS_DIR names another"):
        records.load(job)


DAMAGED = ["", "[]", '{"id": "local-2"}', '{"id": "x", "new": 1}', "\0" * 10]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_record_is_named_and_hides_no_other(tmp_path: Path, text: str) -> None:
    records = Records(tmp_path / "jobs")
    add(records)
    path = Path(add(records).folder, "job.json")
    path.write_text(text)
    ((whole,), (problem,)) = records.all()
    assert whole.id == "local-1"
    assert problem.startswith(f"{path} is left alone: it")
    with pytest.raises(SubmitError, match=r"local-2/job\.json: it.* Expected: the record of a job"):
        records.load("local-2")
    # It is not overwritten either.
    assert add(records).id == "local-3" and path.read_text() == text


def values() -> st.SearchStrategy:
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner))


def changes(names: list[str]) -> st.SearchStrategy:
    return st.dictionaries(st.sampled_from(names), values(), max_size=3)


OF_RECORD = ["id", "scheduler", "name", "submitted", "program", "workers", "ps", "details", "new"]
OF_DETAILS = [*LOCAL, "final", "new"]
OF_PROCESS = ["pid", "start", "boot", "new"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Records:
    records = Records(tmp_path_factory.mktemp("jobs"))
    for process in (None, dataclasses.asdict(Identity.of(os.getpid()))):
        add(records, process=process)
    return records


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(changes(OF_RECORD), changes(OF_DETAILS), changes(OF_PROCESS), values())
def test_whatever_is_in_a_record_it_is_read_or_named(
    two: Records, record: dict, details: dict, process: dict, last: object
) -> None:
    path = two.folder / "local-2" / "job.json"
    whole = path.read_text()
    content = json.loads(whole)
    content["details"]["process"].update(process)
    content["details"].update(details)
    path.write_text(json.dumps({**content, **record}))
    event = {"time": 5.0, "name": "launcher", "event": "gave-up", "exit_code": last, "reason": last}
    path.with_name("logs").joinpath("events.jsonl").write_text(json.dumps(event) + "\n")
    found, problems = two.all()
    assert "local-1" in [one.id for one in found]
    assert len(found) + len(problems) == 2
    # All that is asked of records works.
    for one in found:
        str(one.final)
        if one.scheduler == "local":
            str(LocalEngine(two)._ask(one))
        two.load(one.id)
    path.write_text(whole)


def test_the_folder_is_the_variables_or_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Records.of_user({}).folder == tmp_path / ".local/state/tfdist/jobs"
    assert Records.of_user({"TFDIST_JOBS_DIR": "/shared/jobs"}).folder == Path("/shared/jobs")
