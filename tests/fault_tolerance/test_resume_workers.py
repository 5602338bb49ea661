"""Two workers: whichever dies, the next start goes on as if nothing had happened, bit by bit; SIGTERM loses no step."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fault_tolerance.forked_jobs import Ended, ForkedJobs
from tests.fault_tolerance.job import Job
from tests.fault_tolerance.test_store_damage import empty
from tests.fault_tolerance.trials import KILLED, differences
from tests.tiers import daily
from tfdist.supervision.exit_codes import PREEMPTED

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

KILL = {"when": "on_train_batch_begin", "number": 9}
SIGTERM = {**KILL, "signal_number": int(signal.SIGTERM)}
ARRAYS = Job(model="replicated", strategy="workers", backup={"save_freq": 4})
DATASET = ARRAYS.with_(data="shuffle", validation="shuffle")
COMPRESSED = ARRAYS.light.with_(model="matrices", compression="PowerSGD")
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
    ("job", "killed", "kill"),
    daily(
        [
            pytest.param(ARRAYS, (1,), KILL, id="a worker"),
            pytest.param(LIGHT, (0,), KILL, id="the chief"),
            pytest.param(DATASET, (0, 1), KILL, id="all, a dataset"),
            pytest.param(DATASET, (1,), {"when": "on_test_batch_begin", "number": 10}, id="in validation"),
            pytest.param(COMPRESSED, (1,), KILL, id="with compression"),
            pytest.param(LIGHT, (0,), {"when": "writing", "stage": "tensors", "number": 4}, id="while writing"),
        ],
        "the chief",
    ),
)
def test_killed(
    cluster: Cluster, references: References, job: Job, killed: tuple[int, ...], kill: dict[str, Any]
) -> None:
    ended = cluster.run(job, kill=dict.fromkeys(killed, kill))
    assert [ended[rank].code for rank in killed] == [KILLED] * len(killed)
    assert all(run.code for run in ended)
    assert_same(references(job), cluster.complete(job))


@pytest.mark.parametrize("of_epoch", daily([True, False], "True"))
def test_rows_that_each_worker_reads_by_itself(cluster: Cluster, jobs: ForkedJobs, of_epoch: bool) -> None:
    """A step takes a part of a batch: where the fit goes on counts steps, not batches."""
    job = LIGHT.with_(data="own rows", backup={"save_freq": 4, "of_epoch": of_epoch})
    expected = Cluster(jobs, cluster.folder / "undisturbed").complete(job)
    cluster.run(job, kill={1: KILL})
    assert_same(expected, cluster.complete(job))
    assert cluster.events("resumed")[0]["step"] % 15, "within an epoch"


@pytest.mark.exhaustive
def test_killed_again_and_again(cluster: Cluster, references: References) -> None:
    for rank in (1, 0):
        cluster.run(LIGHT, kill={rank: {**KILL, "number": 7}})
    assert_same(references(LIGHT), cluster.complete(LIGHT))
    (first, second) = (event["step"] for event in cluster.events("resumed") if event["name"] == "worker 1")
    assert 0 < first < second


@pytest.mark.parametrize(
    ("job", "rank"),
    daily(
        [pytest.param(LIGHT, 1, id="a worker"), pytest.param(DATASET, 0, id="the chief, a dataset")],
        "a worker",
    ),
)
def test_sigterm_to_one_stops_all_at_one_step(cluster: Cluster, references: References, job: Job, rank: int) -> None:
    job = job.with_(backup={})
    stopped = cluster.run(job, kill={rank: SIGTERM})
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


@pytest.mark.exhaustive
def test_sigterm_between_epochs(cluster: Cluster, references: References) -> None:
    job = LIGHT.with_(backup={})
    stopped = cluster.run(job, kill={1: {**SIGTERM, "when": "on_epoch_end", "number": 2}})
    assert [run.code for run in stopped] == [PREEMPTED, PREEMPTED]
    assert "SIGTERM: stopped after epoch 2, which is saved; exit code 77" in stopped[0].log
    assert_same(references(job), cluster.complete(job))


@pytest.mark.parametrize(("before", "after"), daily([(3, 2), (2, 1), (1, 2)], "2"))
def test_another_number_of_workers(cluster: Cluster, before: int, after: int) -> None:
    """The result is that of one worker, but for the last bits."""
    job = LIGHT.with_(model="smooth")
    reference = cluster.jobs.run_workers([job.reference], cluster.folder / "reference")[0]
    cluster.run(job, workers=before, kill={before - 1: KILL})
    for run in cluster.complete(job, workers=after):
        assert run.result["fit 1: epochs"] == [0, 1, 2, 3]
        for name, expected in reference.result.items():
            if re.match(r"fit 1: (history|weights|optimizer)/", name):
                received = run.result[name]
                np.testing.assert_allclose(received, expected, atol=1e-5, rtol=0, err_msg=name)


@pytest.mark.exhaustive
def test_another_number_of_workers_with_compression(cluster: Cluster) -> None:
    """PowerSGD is linear: what optimizers get depends on the sum of the rests, not on who has them."""
    reference = cluster.jobs.run_workers([COMPRESSED.reference] * 2, cluster.folder / "reference")[0]
    cluster.run(COMPRESSED, workers=3, kill={2: KILL})
    ended = cluster.complete(COMPRESSED)
    assert "rests of compressed gradients" not in ended[0].log
    for name, expected in reference.result.items():
        if re.match(r"fit 1: (history|weights|optimizer)/", name):
            np.testing.assert_allclose(ended[0].result[name], expected, atol=1e-5, rtol=0, err_msg=name)
    rests = [name for name in reference.result if name.startswith("fit 1: compression/") and "/rest" in name]
    assert rests
    for name in rests:
        received = sum(run.result[name] for run in ended)
        assert np.abs(received).max() > 1e-4


@pytest.mark.exhaustive
def test_another_compression(cluster: Cluster) -> None:
    """Rests that have no place are left out, with a warning; what is not compressed is all there."""
    cluster.run(COMPRESSED, kill={1: KILL})
    ended = cluster.complete(COMPRESSED.with_(compression="TopK"))
    told = "The backup has rests of compressed gradients (4 arrays) that this fit cannot take over: its compression is"
    assert f"{told} TopK(" in ended[0].log
    assert ended[0].result["fit 1: epochs"] == [0, 1, 2, 3]


@pytest.mark.exhaustive
def test_saved_by_time(cluster: Cluster, references: References) -> None:
    """The workers' clocks differ; they agree on the step at which the snapshot is taken."""
    job = LIGHT.with_(backup={"save_freq": "0.02s", "asynchronous": False})
    cluster.run(job, kill={1: {**KILL, "number": 14}})
    steps = {event["step"] for event in cluster.events("saved")}
    assert any(step % 15 for step in steps)
    assert_same(references(job), cluster.complete(job))


@pytest.mark.exhaustive
def test_only_the_chief_writes(cluster: Cluster) -> None:
    job = LIGHT.with_(epochs=2)
    results = cluster.complete(job)
    assert {event["name"] for event in cluster.events("saved")} == {"worker 0"}
    assert len(list((cluster.folder / "backup").iterdir())) == 3
    again = cluster.complete(job)
    assert [run.result["steps of this process"] for run in again] == [0, 0]
    assert_same(results, again)


def without_files(runs: list[Ended]) -> list[Ended]:
    """What does not lie on the chief's disk."""
    return [
        dataclasses.replace(
            run, result={name: value for name, value in run.result.items() if not re.match(r"fit 1: (csv|best)", name)}
        )
        for run in runs
    ]


EACH = LIGHT.with_(hook="a backup of each rank")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(EACH, id="a folder for each rank"),
        pytest.param(LIGHT.with_(hook="a disk of each rank"), id="a disk for each rank"),
        pytest.param(DATASET.with_(hook="a disk of each rank"), id="a disk for each rank, a dataset"),
    ],
)
def test_folders_that_are_not_shared(cluster: Cluster, references: References, job: Job) -> None:
    """The chief reads its own, and gives the others what is in it."""
    cluster.run(job, kill={1: KILL})
    resumed = cluster.complete(job)
    assert_same(without_files(references(job)), without_files(resumed))
    assert len({event["checkpoint"] for event in cluster.events("resumed")}) == 1
    assert [path.name for path in cluster.folder.rglob("checkpoint-*")], "the chief's are there"
    assert not list(cluster.folder.rglob("backup-1/*")) + list(cluster.folder.rglob("disk-1/backup/*"))


@pytest.mark.exhaustive
def test_another_checkpoint_of_the_same_name(cluster: Cluster, references: References) -> None:
    """What an earlier job has left on a worker's disk is not taken for the chief's."""
    cluster.run(EACH.with_(seed=8), kill={1: KILL})
    stale = max((cluster.folder / "backup-0").glob("checkpoint-*")).rename(cluster.folder / "stale")
    shutil.rmtree(cluster.folder / "backup-0")
    cluster.run(EACH, kill={1: KILL})
    newest = max((cluster.folder / "backup-0").glob("checkpoint-*"))
    assert (stale / "manifest.json").read_bytes() != (newest / "manifest.json").read_bytes()
    shutil.move(stale, cluster.folder / "backup-1" / newest.name)
    assert_same(references(EACH), cluster.complete(EACH))


def test_a_chief_whose_disk_is_empty(cluster: Cluster) -> None:
    cluster.run(EACH, kill={1: KILL})
    shutil.move(cluster.folder / "backup-0", cluster.folder / "backup-1")
    ended = cluster.run(EACH)
    assert [run.code for run in ended] == [1, 1]
    for run in ended:
        assert re.search(
            r"ValueError: Received: no backup in \S+/backup-0 of worker 0 \(\S+\), which writes them, but "
            r"checkpoint-\d+ in \S+/backup-1 of worker 1 \(\S+\)\. Expected: the chief where the backups are\. Copy "
            r"the folder to the chief's disk, or use one that all processes share; to begin anew, delete it\.",
            run.log,
        )
        assert run.result["steps of this process"] == 0


@pytest.mark.exhaustive
def test_all_backups_are_damaged(cluster: Cluster) -> None:
    cluster.run(LIGHT, kill={1: KILL})
    for checkpoint in (cluster.folder / "backup").glob("checkpoint-*"):
        empty(checkpoint / "manifest.json")
    ended = cluster.run(LIGHT)
    assert [run.code for run in ended] == [1, 1]
    for run in ended:
        assert re.search(
            r"DamagedBackupsError: \S+/backup holds \d checkpoint\(s\), but none that is complete", run.log
        )
        assert run.result["steps of this process"] == 0
