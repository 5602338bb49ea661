"""Two workers: whichever dies, the next start goes on as if nothing had happened, bit by bit; SIGTERM loses no step."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fault_tolerance.forked_jobs import Ended, ForkedJobs
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.trials import KILLED, differences
from tests.tiers import daily
from tfdist.supervision.exit_codes import PREEMPTED

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

KILL = {"when": "on_train_batch_begin", "number": 9}
SIGTERM = {**KILL, "signal_number": int(signal.SIGTERM)}
ARRAYS = Job(model="replicated", strategy="workers", backup={"save_freq": 4})
DATASET = ARRAYS.with_(data="shuffle", validation="shuffle")
COMPRESSED = ARRAYS.light.with_(model="matrices", compression="PowerSGD")
SHARDED = ARRAYS.light.with_(model="matrices", strategy="sharded")
LIGHT = ARRAYS.light.with_(model="light, replicated")


@dataclasses.dataclass
class Cluster:
    """Runs jobs as several workers, one run after the other in one folder."""

    jobs: ForkedJobs
    folder: Path

    def run(self, job: Job, workers: int = 2, kill: Mapping[int, dict[str, Any]] | None = None) -> list[Ended]:
        """Runs a job on all workers; `kill` says how some of them end themselves."""
        each = [job.with_(kill=(kill or {}).get(rank)) for rank in range(workers)]
        ended = self.jobs.run_workers(each, self.folder)
        for rank, run in enumerate(ended):
            print(f"=== worker {rank}: exit code {run.code}\n{run.log}")
        return ended

    def complete(self, job: Job, workers: int = 2) -> list[Ended]:
        """Runs a job to its end."""
        ended = self.run(job, workers)
        assert [run.code for run in ended] == [0] * workers
        return ended

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What the workers have written into the log of events."""
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture
def cluster(jobs: ForkedJobs, tmp_path: Path) -> Cluster:
    return Cluster(jobs, tmp_path)


class References:
    """Runs of two workers without interruption and without a backup, each made once."""

    def __init__(self, jobs: ForkedJobs, folder: Path) -> None:
        self._jobs, self._folder = jobs, folder
        self._made: dict[str, list[Ended]] = {}

    def __call__(self, job: Job) -> list[Ended]:
        key = repr(job.reference)
        if key not in self._made:
            self._made[key] = Cluster(self._jobs, self._folder / str(len(self._made))).complete(job.reference)
        return self._made[key]


@pytest.fixture(scope="module")
def references(jobs: ForkedJobs, tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(jobs, tmp_path_factory.mktemp("references"))


def assert_same(expected: list[Ended], received: list[Ended]) -> None:
    for rank, (left, right) in enumerate(zip(expected, received, strict=True)):
        # The chief's, after a resumption: on the others ModelCheckpoint is idle.
        idle = {"fit 1: checkpoint/best"} if rank else set()
        assert set(differences(left, right)) <= idle, f"worker {rank}"


@pytest.mark.parametrize(
    ("job", "killed"),
    daily(
        [
            pytest.param(LIGHT, (0,), id="the chief"),
            pytest.param(DATASET, (0, 1), id="all, a dataset"),
            pytest.param(COMPRESSED, (1,), id="with compression"),
            pytest.param(DATASET.with_(strategy="unequal workers"), (1,), id="unequal shares"),
            pytest.param(SHARDED, (0,), id="fully sharded, the chief"),
            pytest.param(SHARDED, (1,), id="fully sharded, another one"),
            pytest.param(LIGHT.with_(strategy="local steps"), (1,), id="local steps"),
        ],
        "the chief",
        "fully sharded, another one",
    ),
)
def test_killed(cluster: Cluster, references: References, job: Job, killed: tuple[int, ...]) -> None:
    ended = cluster.run(job, kill=dict.fromkeys(killed, KILL))
    assert [ended[rank].code for rank in killed] == [KILLED] * len(killed)
    assert all(run.code for run in ended)
    assert_same(references(job), cluster.complete(job))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("data", "of_epoch"),
    [
        ("own rows, unknown number", False),
        ("own rows", True),
        ("unordered", False),
        ("from a function", False),
        ("files", False),
        ("tfds.even_splits", False),
        ("tfds.ReadConfig", False),
    ],
)
def test_data_that_tfdist_reads_otherwise(cluster: Cluster, jobs: ForkedJobs, data: str, of_epoch: bool) -> None:
    """Steps are counted where each worker reads its rows by itself; data without an order get that of the backup."""
    job = LIGHT.with_(data=data, backup={"save_freq": 4, "asynchronous": False, "of_epoch": of_epoch})
    expected = Cluster(jobs, cluster.folder / "undisturbed").complete(job)
    cluster.run(job, kill={1: KILL})
    assert_same(expected, cluster.complete(job))
    assert cluster.events("resumed")[0]["step"] % 15, "within an epoch"


@pytest.mark.parametrize(
    "job", [pytest.param(LIGHT, id="light"), pytest.param(SHARDED, id="fully sharded", marks=pytest.mark.nightly)]
)
def test_sigterm_to_one_stops_all_at_one_step(cluster: Cluster, references: References, job: Job) -> None:
    job = job.with_(backup={})
    stopped = cluster.run(job, kill={1: SIGTERM})
    assert [run.code for run in stopped] == [PREEMPTED, PREEMPTED]
    places = {(event["epoch"], event["step"]) for event in cluster.events("preempted")}
    assert len(cluster.events("preempted")) == 2 and len(places) == 1
    ((epoch, step),) = places
    # The one that got the signal begins its ninth execution; agreeing may take one more.
    assert (epoch, step) in [(1, 27), (1, 30)]
    assert f"SIGTERM: stopped after step {step - 15} of epoch 2, which is saved; exit code 77" in stopped[0].log
    resumed = cluster.complete(job)
    assert_same(references(job), resumed)
    executions = [run.result["steps of this process"] for run in (stopped[0], resumed[0], references(job)[0])]
    assert executions[0] + executions[1] == executions[2]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after", "strategy"), [(2, 1, "workers"), (1, 2, "workers"), (2, 1, "sharded"), (1, 2, "sharded")]
)
def test_another_number_of_workers(cluster: Cluster, before: int, after: int, strategy: str) -> None:
    """The result is that of one worker, but for the last bits."""
    job = LIGHT.with_(model="smooth", strategy=strategy)
    reference = cluster.jobs.run_workers([job.reference], cluster.folder / "reference")[0]
    cluster.run(job, workers=before, kill={before - 1: KILL})
    for run in cluster.complete(job, workers=after):
        assert run.result["fit 1: epochs"] == [0, 1, 2, 3]
        for name, expected in reference.result.items():
            if re.match(r"fit 1: (history|weights|optimizer)/", name):
                received = run.result[name]
                np.testing.assert_allclose(received, expected, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.nightly
def test_parts_of_other_numbers_of_workers(cluster: Cluster) -> None:
    """A fit that is over returns what the backup has: the bits of 2, put together by 1, and cut for 3."""
    job = SHARDED.with_(backup={"delete_checkpoint": False})
    saved = {}
    for epochs, workers in ((2, 2), (2, 1), (3, 1), (3, 3), (4, 3), (4, 2)):
        for run in cluster.complete(job.with_(epochs=epochs), workers):
            state = {name: run.result[name] for name in run.result if re.match(r"fit 1: (weights|optimizer)/", name)}
            expected = saved.setdefault(epochs, state)
            for name, value in expected.items():
                np.testing.assert_array_equal(state[name], value, err_msg=f"{workers} workers: {name}")


@pytest.mark.nightly
def test_saved_by_time(cluster: Cluster, references: References) -> None:
    """The workers' clocks differ; they agree on the step at which the snapshot is taken."""
    job = LIGHT.with_(backup={"save_freq": "0.02s", "asynchronous": False})
    cluster.run(job, kill={1: {**KILL, "number": 14}})
    steps = {event["step"] for event in cluster.events("saved")}
    assert any(step % 15 for step in steps)
    assert_same(references(job), cluster.complete(job))


@pytest.mark.nightly
def test_folders_that_are_not_shared(cluster: Cluster, references: References) -> None:
    """The chief reads its own, and sends the other what is in it."""
    job = LIGHT.with_(hook="a disk of each rank")
    cluster.run(job, kill={1: KILL})
    resumed = cluster.complete(job)
    for expected, received in zip(references(job), resumed, strict=True):
        # The rows of CSVLogger are on the chief's disk.
        assert set(differences(expected, received)) <= {"fit 1: csv"}
    assert len({event["checkpoint"] for event in cluster.events("resumed")}) == 1
    assert not list(cluster.folder.rglob("disk-1/backup/*"))
