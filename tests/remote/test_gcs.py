"""TensorFlow's own gs:// against a server in this process: trainings that are killed, terminated, and refused."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fault_tolerance.forked_jobs import SECONDS, SOURCE, Ended, ForkedJobs, Started
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, at, differences
from tests.remote.fake_gcs import FakeGcs
from tests.tiers import daily
from tfdist.supervision.exit_codes import PREEMPTED

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate by openssl"),
]

ROOT = "gs://bucket/run"
KEPT = "bucket/run/checkpoint-"
JOB = Job(backup={"save_freq": 4, "folder": ROOT}).light
WORKERS = JOB.with_(strategy="workers", model="light, replicated")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    with FakeGcs(tmp_path_factory.mktemp("gcs")) as started:
        yield started


@pytest.fixture(scope="module")
def jobs(server: FakeGcs) -> Iterator[ForkedJobs]:
    """Trainings that take the server for Google's."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        started = ForkedJobs()
    with started:
        yield started


@pytest.fixture
def gcs(server: FakeGcs) -> Iterator[FakeGcs]:
    """The server, with empty buckets."""
    server.objects.clear()
    server.requests.clear()
    yield server
    server.fault = lambda method, kind, name: None


class References:
    """Trainings that nobody disturbs, without backups; each runs once."""

    def __init__(self, jobs: ForkedJobs, folder: Path) -> None:
        self._jobs, self._folder = jobs, folder
        self._made: dict[str, list[Ended]] = {}

    def __call__(self, job: Job, workers: int = 1) -> list[Ended]:
        key = repr(job)
        if key not in self._made:
            folder, jobs = self._folder / str(len(self._made)), self._jobs
            each = [job.reference] * workers
            self._made[key] = [jobs.run(*each, folder)] if workers == 1 else jobs.run_workers(each, folder)
        return self._made[key]


@pytest.fixture(scope="module")
def references(jobs: ForkedJobs, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(jobs, tmp_path_factory.mktemp("references"))


def show(runs: list[Ended]) -> None:
    for run in runs:
        print(f"=== exit code {run.code}\n{run.log}")


def complete(gcs: FakeGcs) -> dict[str, bool]:
    """The checkpoints in the bucket, and whether each has its manifest."""
    found: dict[str, bool] = {}
    for name in gcs.names(KEPT):
        folder = name.split("/")[2]
        found[folder] = found.get(folder, False) or name.endswith("manifest.json")
    return found


def test_contract(gcs: FakeGcs) -> None:
    """In a process of its own, for TensorFlow reads its settings as it is loaded."""
    program = (
        "from tests.remote.contract import CONTRACT\n"
        "from tfdist.storage.selection import storage_of\n"
        "from tfdist.storage.probe import check_writable\n"
        "for number, check in enumerate(CONTRACT):\n"
        "    check(storage_of('gs://bucket/x'), f'gs://bucket/contract-{number}')\n"
        "    print(check.__name__)\n"
        "check_writable(storage_of('gs://bucket/x'), 'gs://bucket/probe')\n"
    )
    environment = {**os.environ, **gcs.environment, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=SOURCE, capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert "one_of_two_creates" in done.stdout
    assert gcs.names("bucket/probe") == []
    # A page of the list has three entries.
    assert gcs.count()["GET", "list"] > 10


def kill_at_request(gcs: FakeGcs, started: Started, number: int) -> None:
    """Kills a training at a request after its second backup, which is not answered then."""
    seen = [0]

    def fault(method: str, kind: str, name: str) -> int | None:
        if sum(complete(gcs).values()) >= 2 or seen[0]:
            seen[0] += 1
            if seen[0] == number:
                os.kill(started.started.result(), signal.SIGKILL)
                return 500
        return None

    gcs.fault = fault


# Some of the thirty of a backup: each costs two trainings.
@pytest.mark.parametrize("number", [2, 6, 11, 17, 24])
def test_killed_at_a_request(
    gcs: FakeGcs, jobs: ForkedJobs, references: References, tmp_path: Path, number: int
) -> None:
    [reference] = references(JOB)
    killed_at(gcs, jobs, reference, tmp_path, number)


def killed_at(gcs: FakeGcs, jobs: ForkedJobs, reference: Ended, folder: Path, number: int) -> None:
    gcs.objects.clear()
    started = jobs.start(JOB, folder)
    kill_at_request(gcs, started, number)
    try:
        first = started.wait()
    finally:
        started.kill()  # the bucket is that of the next test, too
    gcs.fault = lambda method, kind, name: None
    assert first.code == KILLED, first.log
    assert sum(complete(gcs).values()) >= 2
    assert "bucket/run/.lease" in gcs.names()
    second = jobs.run(JOB, folder)
    show([first, second])
    assert differences(reference, second) == []
    assert second.result["steps of this process"] < reference.result["steps of this process"]
    assert "is damaged" not in second.log
    found = complete(gcs)
    assert len(found) == 3 and all(found.values()), "what the killed process has left is gone"
    assert [name for name in gcs.names() if not name.startswith(KEPT)] == [], "no lease and no probe"


def test_two_workers(gcs: FakeGcs, jobs: ForkedJobs, references: References, tmp_path: Path) -> None:
    expected = references(WORKERS, workers=2)
    first = jobs.run_workers([WORKERS.with_(kill=at(9)), WORKERS], tmp_path)
    assert first[0].code == KILLED
    second = jobs.run_workers([WORKERS] * 2, tmp_path)
    show([*first, *second])
    assert [run.code for run in second] == [0, 0]
    for left, right in zip(expected, second, strict=True):
        assert differences(left, right) == []


def test_terminated(gcs: FakeGcs, jobs: ForkedJobs, references: References, tmp_path: Path) -> None:
    """The backup of the step is in the bucket before it exits; the folder is free for any machine."""
    [reference] = references(JOB)
    first = jobs.run(JOB.with_(kill={**at(6), "signal_number": int(signal.SIGTERM)}), tmp_path)
    assert first.code == PREEMPTED, first.log
    assert "bucket/run/.lease" not in gcs.names()
    second = jobs.run(JOB, tmp_path)
    show([first, second])
    assert differences(reference, second) == []
    steps = [run.result["steps of this process"] for run in (first, second, reference)]
    assert steps[0] + steps[1] == steps[2], "no step is redone"


def test_a_finished_fit_leaves_nothing(gcs: FakeGcs, jobs: ForkedJobs, tmp_path: Path) -> None:
    job = JOB.with_(backup={**JOB.backup, "delete_checkpoint": True, "max_to_keep": 1, "double_checkpoint": True})
    run = jobs.run(job, tmp_path)
    show([run])
    assert (run.code, gcs.names()) == (0, [])


def test_requests_of_a_backup(gcs: FakeGcs, jobs: ForkedJobs, tmp_path: Path) -> None:
    """As docs/remote-storage.md says: for each backup at most 30, 10 of which change something."""
    marks: list[int] = []

    def fault(method: str, kind: str, name: str) -> None:
        if kind == "data" and name.endswith("manifest.json"):
            marks.append(len(gcs.requests))

    gcs.fault = fault
    run = jobs.run(JOB, tmp_path)
    show([run])
    assert run.code == 0
    for begin, end in itertools.pairwise(marks[3:]):
        requests = Counter(method for method, _, name in gcs.requests[begin:end] if not name.endswith(".lease"))
        print(requests)
        assert requests["GET"] <= 20
        assert requests["POST"] + requests["PUT"] + requests["DELETE"] <= 10


def failing(times: int, status: int, where: Callable[[str, str, str], bool]) -> Callable[[str, str, str], int | None]:
    left = [times]

    def fault(method: str, kind: str, name: str) -> int | None:
        if left[0] > 0 and where(method, kind, name):
            left[0] -= 1
            return status
        return None

    return fault


def test_a_bucket_that_fails_costs_no_training(
    gcs: FakeGcs, jobs: ForkedJobs, references: References, tmp_path: Path
) -> None:
    """A moment's failure costs nothing; one of a whole backup costs that backup, with a warning."""
    [reference] = references(JOB)
    lost = "checkpoint-00000003"
    gcs.fault = failing(10**6, 403, lambda method, kind, name: lost in name and kind in ("upload", "data"))
    run = jobs.run(JOB, tmp_path)
    show([run])
    assert run.code == 0
    assert "A backup could not be written; training goes on, and the last good one is kept" in run.log
    assert differences(reference, run) == []
    gcs.objects.clear()
    gcs.fault = failing(6, 503, lambda method, kind, name: kind in ("upload", "data", "list"))
    run = jobs.run(JOB, tmp_path / "again")
    show([run])
    assert (run.code, "could not be written" in run.log) == (0, False)
    assert differences(reference, run) == []


REFUSALS: dict[str, tuple[Callable[[str, str, str], bool], int, str]] = {
    "write": (lambda method, kind, name: kind == "upload", 403, "cannot be written: .*403"),
    "no such bucket": (lambda method, kind, name: kind == "upload", 404, "cannot be written: .*404"),
    "read": (lambda method, kind, name: kind == "read", 403, "cannot be read: .*403"),
    "remove": (lambda method, kind, name: method == "DELETE", 403, "cannot be removed: .*403"),
    # It must not look like no backups.
    "list": (lambda method, kind, name: kind == "list" and name == "bucket/run/", 403, "403.*when reading"),
}


@pytest.mark.parametrize("what", daily(list(REFUSALS), "list"))
def test_what_is_not_allowed_is_found_at_the_beginning(
    gcs: FakeGcs, jobs: ForkedJobs, tmp_path: Path, what: str
) -> None:
    where, status, message = REFUSALS[what]
    gcs.fault = failing(10**6, status, where)
    run = jobs.run(JOB, tmp_path)
    show([run])
    assert run.code == 1
    assert run.result is None or run.result["steps of this process"] == 0
    text = " ".join(run.log.split())
    assert re.search(rf"backup_dir '{ROOT}': .*{message}", text)
    assert "See that gs://bucket exists" in text and "Storage Object User" in text


def test_files_of_callbacks(gcs: FakeGcs, jobs: ForkedJobs, tmp_path: Path) -> None:
    """Two workers, killed and started again: the chief alone writes, once each epoch."""
    job = WORKERS.with_(callbacks=("gs checkpoint",))
    first = jobs.run_workers([job.with_(kill=at(9)), job], tmp_path)
    assert first[0].code == KILLED
    gcs.requests.clear()
    second = jobs.run_workers([job] * 2, tmp_path)
    show([*first, *second])
    assert [run.code for run in second] == [0, 0]
    # TensorFlow makes an object for the folder, too.
    models = [name for name in gcs.names("bucket/models/") if name != "bucket/models/"]
    assert models == [f"bucket/models/epoch-{epoch:02d}.keras" for epoch in range(1, WORKERS.epochs + 1)]
    assert all(gcs.objects[name][:2] == b"PK" for name in models)
    uploads = [name for _, kind, name in gcs.requests if kind == "upload" and name in models]
    assert len(uploads) == len(set(uploads)) > 0, "each model once, by one process"


def test_a_callback_that_may_not_write_is_refused_before_the_first_step(
    gcs: FakeGcs, jobs: ForkedJobs, tmp_path: Path
) -> None:
    gcs.fault = failing(10**6, 403, lambda method, kind, name: kind == "upload")
    run = jobs.run(JOB.with_(backup=None, strategy="mirrored", callbacks=("gs checkpoint",)), tmp_path)
    show([run])
    assert run.code == 1
    assert run.result["steps of this process"] == 0
    text = " ".join(run.log.split())
    assert re.search(r"Received: ModelCheckpoint\(.*gs://bucket/models/.*cannot be written: .*403", text)


def test_two_trainings_in_one_folder(gcs: FakeGcs, jobs: ForkedJobs, references: References, tmp_path: Path) -> None:
    [reference] = references(JOB)
    goes_on = threading.Event()

    def hold(method: str, kind: str, name: str) -> None:
        """Lets the first training wait for its second backup; its lease is renewed meanwhile."""
        if kind == "data" and name.endswith("2/manifest.json"):
            goes_on.wait(SECONDS)

    gcs.fault = hold
    first = jobs.start(JOB, tmp_path / "first")
    gcs.wait_for(lambda: sum(complete(gcs).values()) >= 1)
    try:
        second = jobs.run(JOB, tmp_path / "second")
    finally:
        goes_on.set()
    ended = first.wait()
    show([ended, second])
    assert second.code == 1
    assert f"FolderInUseError: Received: backup_dir '{ROOT}', to which process " in second.log
    assert ended.code == 0
    assert differences(reference, ended) == []
