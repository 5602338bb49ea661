"""The jobs that are kept as files."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.jobs.conftest import SOURCE
from tfdist.jobs.local.attempt import beginning_of, is_due
from tfdist.jobs.local.runner import active, host_of, parallel_jobs, queue_of
from tfdist.jobs.record import Records, new_id
from tfdist.jobs.request import Request, SubmitError
from tfdist.launcher.arguments import Target
from tfdist.supervision.identity import Identity

REQUEST = Request("local", Target("module", ("train", "--epochs", "3")), workers=3, ps=1, name="mine")


LOCAL = {"state": "queued", "attempt": 1, "time_limit": None, "grace": 60, "parallel_jobs": 1}


def add(records: Records, wanted: str | None = None, **details: object):
    return records.add(REQUEST, records.make_folder("mine"), wanted, **{**LOCAL, **details})


def test_what_is_added_can_be_loaded(tmp_path: Path) -> None:
    records = Records(tmp_path / "jobs")
    record = add(records, state="queued")
    assert records.load("local-1") == record
    assert (record.program, record.workers, record.ps) == (["-m", "train", "--epochs", "3"], 3, 1)
    changed = records.update("local-1", lambda now: now.with_details(state="failed", pid=3))
    assert records.load("local-1").details == changed.details == {**LOCAL, "state": "failed", "pid": 3}


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


@pytest.mark.parametrize(
    "text",
    ["", "\0" * 400, "{", "[]", "[" * 100_000, '{"id": "local-2"}', json.dumps({"other": 1}), "\xff", "1" * 5000],
)
def test_a_damaged_record_is_named_and_hides_no_other(tmp_path: Path, text: str) -> None:
    records = Records(tmp_path / "jobs")
    add(records)
    (records.folder / "local-2.json").write_text(text)
    assert [record.id for record in records.all()] == ["local-1"]
    (problem,) = records.unreadable()
    assert problem.startswith(f"{records.folder}/local-2.json is left alone: it")
    with pytest.raises(SubmitError, match=r"local-2\.json, which is damaged or of another version"):
        records.load("local-2")
    # It is not overwritten either.
    assert add(records).id == "local-3" and (records.folder / "local-2.json").read_text() == text


def values() -> st.SearchStrategy:
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
    return st.recursive(plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner))


def changes(names: list[str]) -> st.SearchStrategy:
    return st.dictionaries(st.sampled_from(names), values(), max_size=3)


OF_RECORD = ["id", "scheduler", "name", "submitted", "folder", "program", "workers", "ps", "details", "new"]
OF_DETAILS = [*LOCAL, "started", "ended", "place", "places", "due", "stop", "final", "host", "detail", "stopped"]


FEW = hypothesis.settings(max_examples=60, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])


@FEW
@hypothesis.given(changes(OF_RECORD), changes(OF_DETAILS), st.sampled_from(["queued", "running", "failed"]))
def test_whatever_is_in_a_record_it_is_read_or_named(record: dict, details: dict, state: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        records = Records(Path(folder, "jobs"))
        good, other = add(records), add(records, state=state, place=0, places=1, started=5.0)
        path = records.folder / f"{other.id}.json"
        content = json.loads(path.read_text())
        content["details"].update(details)
        path.write_text(json.dumps({**content, **record}))
        found, problems = records.all(), records.unreadable()
        assert good in found and len(found) + len(problems) == 2
        # All that is asked of records works, for those of another host, too.
        for one in found:
            str(one.final)
            if one.scheduler == "local":
                assert one in queue_of(records, host_of(one)) and isinstance(is_due(one), bool)
                beginning_of(Path(one.folder), one.details["attempt"])
            assert parallel_jobs(records) >= 1 and len(active(records)) <= 2
            with contextlib.suppress(SubmitError):
                records.load(one.id)


@FEW
@hypothesis.given(st.binary(max_size=40) | values().map(lambda value: json.dumps(value).encode()))
def test_whatever_is_in_the_file_of_an_attempt_its_process_is_known_or_gone(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "process-1.json").write_bytes(content)
        begun = beginning_of(Path(folder), 1)
        assert begun is not None and not begun.process.is_alive and begun.process.age > 0


@FEW
@hypothesis.given(st.dictionaries(st.sampled_from(["pid", "start", "boot"]), values()), values())
def test_whatever_says_who_a_process_is(process: dict, position: object) -> None:
    own = Identity.of(os.getpid())
    content = {"process": {**dataclasses.asdict(own), **process}, "position": position}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "process-1.json").write_text(json.dumps(content))
        begun = beginning_of(Path(folder), 1)
        assert begun is not None and isinstance(begun.process.is_alive, bool) and begun.position >= 0


def test_the_folder_is_the_variables_or_below_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Records.of_user({}).folder == tmp_path / ".local/state/tfdist/jobs"
    assert Records.of_user({"TFDIST_JOBS_DIR": "/shared/jobs"}).folder == Path("/shared/jobs")
