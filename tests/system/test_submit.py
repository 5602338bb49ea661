"""`tfdist submit --scheduler slurm` with real jobs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import Tfdist
from tests.launcher.conftest import wait_until
from tests.system.slurm import Slurm
from tfdist.jobs.status import last_progress
from tfdist.supervision.events import last_events

pytestmark = pytest.mark.slurm

WAITS = """\
import os, signal, sys, time
task = os.environ["SLURM_PROCID"]
def stop(number, frame):
    print("stopped", task, flush=True)
    time.sleep(1)
    sys.exit(77)
signal.signal(signal.SIGTERM, stop)
print("running", task, os.environ.get("COLOUR"), os.getcwd(), flush=True)
if "trains" in sys.argv:
    with open(os.environ["TFDIST_EVENT_LOG"], "a") as log:
        log.write('{"time": 1, "name": "worker", "event": "progress", "epoch": 1, "step": 1}\\n')
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end and not os.path.exists("go"):
    time.sleep(0.05)
sys.exit(int(sys.argv[2]) if task == "1" else 0)
"""


@pytest.fixture
def slurm(
    slurm_here: Slurm, run_tfdist: Tfdist, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Tfdist]:
    """`run_tfdist` with a Slurm, which shows its logs if the test fails; its jobs are cancelled afterwards."""
    failed_before = request.session.testsfailed
    for name, value in slurm_here.env.items():
        monkeypatch.setenv(name, value)
        run_tfdist.env[name] = value
    (run_tfdist.folder / "waits.py").write_text(WAITS)
    yield run_tfdist
    if request.session.testsfailed > failed_before:
        print(slurm_here.logs())
    for record in run_tfdist.records.all()[0]:
        subprocess.run(["scancel", record.details["job"]], timeout=60)
        wait_until(lambda job=record.details["job"]: not ask("squeue", "-h", "-j", job), 60, "the end of the job")


def ask(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60).stdout


def submit(slurm: Tfdist, *words: str, **env: str) -> str:
    return slurm("submit", "--scheduler", "slurm", *words, **env)


def number(slurm: Tfdist, job: str) -> str:
    return slurm.record(job).details["job"]


def start_again_soon(job: str) -> None:
    """Slurm lets a job wait for two minutes before it is run again; its nodes refuse it in the second of its end."""
    wait_until(lambda: "BeginTime" in ask("squeue", "-h", "-j", job, "-o", "%T %r"), 60, "the job in the queue")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+3"], check=True, timeout=60)


def test_a_job_from_its_begin_to_its_end(slurm: Tfdist, tmp_path: Path) -> None:
    slurm.folder = tmp_path / "with a space"
    slurm.folder.mkdir()
    (slurm.folder / "waits.py").write_text(WAITS)
    job = submit(slurm, "-n", "2", "--name", "mine", "--env", "COLOUR=dark red", "waits.py", "600", "0")
    assert job == "slurm-1" and slurm("status", job).endswith(f"slurm's job {number(slurm, job)}")
    script = Path(slurm.record(job).folder, "job.sh")
    assert script.stat().st_mode & 0o777 == 0o600
    assert slurm.wait_for(job, "running").startswith(f"{job}  mine  running")
    (slurm.folder / "go").touch()
    # Until it is over.
    lines = slurm("logs", "-f", job).splitlines()
    assert sorted(line for line in lines if "running" in line) == [
        f"{task}: running {task} dark red {slurm.folder}" for task in (0, 1)
    ]
    assert re.fullmatch(rf"{job}  mine  succeeded after \d+ s", slurm.wait_for(job, "succeeded"))
    assert slurm("status").startswith(f"{job}  mine  succeeded")


def test_a_job_that_slurm_has_forgotten(slurm: Tfdist) -> None:
    job = submit(slurm, "-n", "2", "--max-restarts", "0", "waits.py", "0", "3")
    slurm.wait_for(job, "failed")
    record = slurm.record(job)
    # It is kept here, too.
    slurm.records.update(job, job="999999")
    assert slurm("status", job).splitlines()[0].endswith("s: exit code 3")
    slurm.records.update(job, final=None)
    assert slurm("status", job).splitlines()[0].endswith("failed: exit code 3")
    slurm.records.update(job, final=None)
    Path(record.folder, "exit-code").unlink()
    assert "lost: Slurm does not know job 999999, and its script has not ended" in slurm("status", job)
    slurm.records.update(job, job=record.details["job"])


@pytest.mark.parametrize(
    ("options", "words", "said", "starts"),
    [
        (["--max-restarts", "1"], ["1", "3", "trains"], "restart 1 of 1", 2),
        ([], ["0", "3"], "it failed before its first training step", 1),
    ],
)
def test_a_failure_starts_the_step_again_if_it_has_trained(slurm: Tfdist, options, words, said, starts) -> None:
    job = submit(slurm, "-n", "2", *options, "waits.py", *words)
    assert slurm.wait_for(job, "failed").endswith(": exit code 3")
    output = slurm("logs", job)
    assert (output.count("running 1"), output.count(said)) == (starts, 1)


def test_cancel_lets_the_tasks_save(slurm: Tfdist) -> None:
    job = submit(slurm, "-n", "2", "--grace", "30", "waits.py", "600", "0")
    wait_until(lambda: slurm("logs", job).count("running") == 2, 120, "both tasks")
    assert slurm("cancel", job) == f"{job}: gets SIGTERM, and has 30 s to save its state"
    slurm.wait_for(job, "cancelled")
    output = slurm("logs", job)
    assert (output.count("stopped 0"), output.count("stopped 1"), output.count("running")) == (1, 1, 2)
    assert "back into the queue" not in output
    assert slurm("cancel", job).startswith(f"{job}: is over already, cancelled after")


def test_cancel_of_a_job_that_waits(slurm: Tfdist) -> None:
    cores = [int(count) for count in ask("sinfo", "-h", "-N", "-o", "%c").split()]
    everything = ["-n", str(len(cores)), "--cpus-per-worker", str(min(cores))]
    first = submit(slurm, *everything, "waits.py", "600", "0")
    slurm.wait_for(first, "running")
    job = submit(slurm, *everything, "waits.py", "600", "0")
    slurm.wait_for(job, "queued")
    # Slurm says so once it has tried to start it.
    reason = "Resources (waits until enough nodes are free)"
    wait_until(lambda: slurm("status", job).splitlines()[0] == f"{job}  waits  queued: {reason}", 60, "the reason")
    assert slurm("cancel", job) == f"{job}: cancelled"
    assert slurm.wait_for(job, "cancelled") == f"{job}  waits  cancelled after 0 s"
    assert slurm.wait_for(first, "running")


def test_scancel_is_obeyed_too(slurm: Tfdist) -> None:
    job = submit(slurm, "-n", "2", "waits.py", "600", "0")
    wait_until(lambda: slurm("logs", job).count("running") == 2, 120, "both tasks")
    subprocess.run(["scancel", number(slurm, job)], check=True, timeout=60)
    slurm.wait_for(job, "cancelled")
    assert "back into the queue" not in slurm("logs", job)
    assert ask("squeue", "-h", "-j", number(slurm, job)) == ""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_preempted_training_ends_as_an_undisturbed_one(slurm: Tfdist) -> None:
    shutil.copy(Path(__file__).with_name("training_program.py"), slurm.folder)
    # Three of a node's four cores: two nodes.
    options = ["-n", "2", "--cpus-per-worker", "3"]
    plain = submit(slurm, *options, "training_program.py", "plain", "0")
    slurm.wait_for(plain, "succeeded", deadline=240)
    job = submit(slurm, *options, "training_program.py", "stopped", "1")
    log = slurm.record(job).event_log
    wait_until(lambda: (progress := last_progress(last_events(log))) and progress.epoch >= 2, 240, "the second epoch")
    status = slurm("status", job).splitlines()
    assert re.fullmatch(r"  epoch [2-6]/6, step \d/8, loss [\d.]+, about \d+ (s|min) left", status[1]), status
    subprocess.run(["scancel", "--batch", "--signal=TERM", number(slurm, job)], check=True, timeout=60)
    start_again_soon(number(slurm, job))
    slurm.wait_for(job, "succeeded", deadline=240)
    results = [re.findall(r"0: result (.*)", slurm("logs", each)) for each in (plain, job)]
    assert len(results[0]) == 1 and results[0] == results[1]
    output = slurm("logs", job)
    assert "exit code 77" in output and "the job goes back into the queue" in output and "The fit goes on at" in output
    assert slurm("status", job).splitlines()[1].startswith("  epoch 6/6, step 8/8, loss ")
