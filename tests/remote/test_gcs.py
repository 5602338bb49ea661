"""TensorFlow's own gs:// against a server in this process: trainings that are killed, terminated, and refused."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault_tolerance.forked_jobs import SOURCE, ForkedJobs
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, at, differences
from tests.remote.fake_gcs import FakeGcs

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate by openssl"),
]

ROOT = "gs://bucket/run"
KEPT = "bucket/run/checkpoint-"
JOB = Job(backup={"save_freq": 4, "folder": ROOT}).light.with_(epochs=2)
WORKERS = JOB.with_(strategy="workers", model="light, replicated", callbacks=("gs checkpoint",))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeGcs]:
    with FakeGcs(tmp_path_factory.mktemp("gcs")) as started:
        yield started


@pytest.fixture(scope="module")
def jobs(server: FakeGcs) -> Iterator[ForkedJobs]:
    """Trainings that take the server for Google's."""
    with ForkedJobs(server.environment) as started:
        yield started


@pytest.fixture
def gcs(server: FakeGcs) -> Iterator[FakeGcs]:
    """The server, with empty buckets."""
    server.objects.clear()
    server.requests.clear()
    yield server
    server.fault = lambda method, kind, name: None


def test_contract(gcs: FakeGcs) -> None:
    """In a process of its own, for TensorFlow reads its settings as it is loaded."""
    program = (
        "from tests.remote.contract import CONTRACT\n"
        "from tfdist.storage.selection import storage_of\n"
        "from tfdist.storage.base import check_writable\n"
        "for number, check in enumerate(CONTRACT):\n"
        "    check(storage_of('gs://bucket/x'), f'gs://bucket/contract-{number}')\n"
        "    print(check.__name__)\n"
        "check_writable(storage_of('gs://bucket/x'), 'gs://bucket/probe')\n"
    )
    environment = {**os.environ, **gcs.environment, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=SOURCE, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "a_folder_is_removed" in done.stdout
    assert gcs.names("bucket/probe") == []
    # A page of the list has three entries.
    assert sum(kind == "list" for _, kind, _ in gcs.requests) > 10


def test_two_workers(gcs: FakeGcs, jobs: ForkedJobs, tmp_path: Path) -> None:
    """They are killed and started again; the chief alone writes the models of a callback, once each epoch."""
    expected = jobs.run_workers([WORKERS.reference] * 2, tmp_path / "reference")
    gcs.objects.clear()
    first = jobs.run_workers([WORKERS.with_(kill=at(9)), WORKERS], tmp_path)
    assert first[0].code == KILLED
    gcs.requests.clear()
    second = jobs.run_workers([WORKERS] * 2, tmp_path)
    for run in (*first, *second):
        print(f"=== exit code {run.code}\n{run.log}")
    assert [run.code for run in second] == [0, 0]
    for left, right in zip(expected, second, strict=True):
        assert differences(left, right) == []
    # TensorFlow makes an object for the folder, too.
    models = [name for name in gcs.names("bucket/models/") if name != "bucket/models/"]
    assert models == [f"bucket/models/epoch-{epoch:02d}.keras" for epoch in range(1, WORKERS.epochs + 1)]
    assert all(gcs.objects[name][:2] == b"PK" for name in models)
    uploads = [name for _, kind, name in gcs.requests if kind == "upload" and name in models]
    assert len(uploads) == len(set(uploads)) > 0, "each model once, by one process"


def test_a_bucket_that_cannot_be_listed_is_not_empty(gcs: FakeGcs, jobs: ForkedJobs, tmp_path: Path) -> None:
    gcs.fault = lambda method, kind, name: 403 if kind == "list" and name == "bucket/run/" else None
    run = jobs.run(JOB, tmp_path)
    print(run.log)
    assert run.code == 1
    assert run.result is None or run.result["steps of this process"] == 0
    text = " ".join(run.log.split())
    assert re.search(rf"backup_dir '{ROOT}': .*403.*when reading", text) and "See that gs://bucket exists" in text
