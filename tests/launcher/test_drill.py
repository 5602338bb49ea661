"""`tfdist drill` with a program that saves and resumes as a fit does, but needs no TensorFlow for it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Sequence

import pytest

from tests.launcher.conftest import Launch, wait_until
from tests.launcher.training import program
from tests.tiers import daily

# The chief saves after every fourth step. What is trained is the list of steps; FLAWS is a set of words.
TRAINING = """
    from tfdist.checkpoint.manifest import checkpoint_name, committed_checkpoints
    from tfdist.checkpoint.manifest import DamagedCheckpointError
    from tfdist.checkpoint.manifest import Manifest, encode_manifest, measure_file, verify_checkpoint
    from tfdist.supervision.events import EventLog

    flaws = set(sys.argv[1:])
    events = EventLog.from_environment()
    folder = Path(os.environ["TFDIST_DRILL_DIR"]) / "backup"
    workers = len(config["cluster"]["worker"])
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
    STEPS = 60
    trial = Path(os.environ["TFDIST_LOG_DIR"]).name  # the name of the fault, or reference

    def keep_step(step):
        # As an all-reduce does: nobody is ahead of the others, and all stop before the same step.
        # The size of its file tells a worker's step; LAST more: it stopped before that one.
        LAST, patience = 10_000, 20.0
        stops = bool(stopped)
        start = f"{os.environ['TFDIST_RUN_ID']}-{restart}"
        own, other = (folder.parent / f"step-{start}-{n}" for n in (index, 1 - index))
        own.touch()
        os.truncate(own, step + LAST * stops)
        while workers == 2 and not stops and patience > 0:
            reached = other.stat().st_size if other.exists() else 0
            stops = LAST <= reached <= LAST + step
            if reached >= step: break
            time.sleep(0.002)
            if stopped: patience -= 0.01  # the other may be dead
        return not stops

    told = []

    def tell(event, **facts):
        # As a writer that is slower than the training.
        told.append((event, facts))
        while told and ("slow-writer" not in flaws or restart or facts["step"] == STEPS):
            kind, known = told.pop(0)
            events.write(kind, **known)

    def save(losses, done=False):
        if index > 0: return
        name = checkpoint_name(int(time.time_ns() // 1000))
        try:
            (folder / name).mkdir(parents=True)
            (folder / name / "state.data").write_bytes(bytes(len(losses)) * 1000)
            history = {"class": "History", "compares": False, "state": {"dict": [["loss", {"list": losses}]]}}
            meta = {"epoch": 0, "steps": 0, "total": len(losses), "done": done, "stopped": False, "variables": {}}
            files = {"state.data": measure_file(str(folder / name / "state.data"))}
            manifest = encode_manifest(Manifest({**meta, "callbacks": [history], "losses": losses}, files, {}))
            (folder / name / "partial").write_bytes(manifest)
            (folder / name / "partial").rename(folder / name / "manifest.json")
            tell("saved", checkpoint=name, step=len(losses))
            while "stays" in flaws and "reference" not in trial and not stopped: time.sleep(0.01)
        except OSError as error:
            events.write("not saved", error=str(error))

    def resume():
        for name in reversed(committed_checkpoints(str(folder))):
            try:
                losses = verify_checkpoint(str(folder / name)).meta["losses"]
            except DamagedCheckpointError:
                continue
            writer.resumed(len(losses))
            events.write("resumed", checkpoint=name, step=len(losses))
            return losses[1:] if "forgets" in flaws else losses
        return []

    writer.begin()
    if "random" in flaws and index == 0: events.write("not repeatable", reason="Shuffle without a seed")
    if "hangs" in flaws and restart: wait()
    losses = resume()
    keep_step(0)
    while len(losses) < STEPS:
        time.sleep(0.05)
        if trial == "shrink" and workers == 1 and len(losses) == STEPS - 8:
            while not stopped: time.sleep(0.01)  # until the other one is to come back
        if not keep_step(len(losses) + 1): break
        losses.append(time.time() if "random" in flaws else len(losses))
        writer.report("training", len(losses))
        if len(losses) % (50 if "rarely" in flaws else 4) == 0 and "never" not in flaws: save(losses)
    if len(losses) < STEPS:
        save(losses)
        events.write("preempted", step=len(losses))
        sys.exit(77)
    if "never" not in flaws: save(losses, done=True)
    if "slow-writer" in flaws and "reference" not in trial and not restart:
        while not stopped: time.sleep(0.01)  # until the fault strikes
    writer.report("done", len(losses))
    if "fails" in flaws: sys.exit(3)
"""


@pytest.fixture
def drill(launch):
    """`drill(*options, flaws=[...])` starts a drill."""

    def start(*options: str, flaws: Sequence[str] = (), **more) -> Launch:
        command = [sys.executable, "-m", "tfdist", "drill", "--log-dir", "logs", *options, "script.py", *flaws]
        return launch(program(TRAINING), command=command, **more)

    return start


@pytest.mark.nightly
def test_all_faults_are_survived(drill, tmp_path) -> None:
    started = drill("--json", "--hang-timeout", "10")
    result = started.finish(250)
    assert result.code == 0, result.err
    report = json.loads(result.out)
    assert report["identical"] is True
    rows = {row["fault"]: row for row in report["rows"]}
    assert list(rows) == ["kill-worker", "kill-chief", "hang", "corrupt", "truncate", "disk-full", "preempt", "shrink"]
    assert {name: row["result"] for name, row in rows.items()} == {
        **dict.fromkeys(rows, "identical"),
        "shrink": "complete",
    }
    assert {row["steps_redone"] for row in rows.values()} <= set(range(12))
    for name, row in rows.items():
        assert 0 <= row["detected"] < row["training_again"], (name, row)
    assert rows["hang"]["detected"] > 9.9
    assert rows["preempt"]["steps_redone"] == 0
    # The newest backup was no good: at least its four steps more had to be done again.
    assert min(rows[name]["steps_redone"] for name in ("corrupt", "truncate")) >= 4
    assert "tfdist drill: 1/9 an undisturbed run, as the reference\ntfdist drill:   60 steps, 14 backups" in result.err
    assert "tfdist drill: 4/9 hang a worker\ntfdist drill:   identical: detected after " in result.err
    # The disk was full indeed, and the backups are not kept.
    assert (
        '"event": "not saved", "error": "[Errno 27] File too large'
        in (tmp_path / "logs/disk-full/events.jsonl").read_text()
    )
    assert not list((tmp_path / "logs").glob("*/backups"))
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_difference_ends_the_drill_and_is_told(drill, tmp_path) -> None:
    result = drill(flaws=["forgets"]).finish(120)
    assert result.code == 1
    assert "  kill a worker " in result.out and "kill the chief" not in result.out
    assert "\nkill-worker: differs\n  History.loss[0]: 0 in the reference, 1 here\n" in result.out
    assert re.search(r"\n  and \d+ more \(--json shows all\)\n", result.out)
    assert "a second undisturbed run shows whether that ends like the first\n" in result.err
    assert "tfdist: logs, and the backups of what is not identical: logs/\n" in result.err
    assert {path.parent.name for path in tmp_path.glob("logs/*/backups")} == {"reference", "reference-2", "kill-worker"}


@pytest.mark.nightly
def test_keep_going(drill) -> None:
    result = drill("--keep-going", "--only", "kill-chief", "--only", "kill-worker", flaws=["forgets"]).finish(120)
    assert result.code == 1
    assert "\nkill-worker: differs\n" in result.out and "\nkill-chief: differs\n" in result.out
    assert result.err.count("a second undisturbed run") == 1


@pytest.mark.nightly
def test_a_fault_after_the_last_step_counts_for_nothing(drill) -> None:
    options = ["-n", "1", "--only", "kill-chief", "--only", "preempt"]
    result = drill("--json", *options, flaws=["slow-writer"]).finish(120)
    assert result.code == 1
    report = json.loads(result.out)
    assert report["identical"] is False
    # It is no reason to leave the others out.
    assert [(row["fault"], row["result"]) for row in report["rows"]] == [
        ("kill-chief", "not tested"),
        ("preempt", "failed"),
    ]
    (line,) = report["rows"][0]["details"]
    assert line.startswith("nothing was left to train when the fault struck, after the last step. Train for more ")


@pytest.mark.nightly
def test_a_script_that_is_not_reproducible(drill) -> None:
    result = drill("--json", flaws=["random"]).finish(120)
    assert result.code == 1
    (row,) = json.loads(result.out)["rows"]
    assert (row["result"], row["fault"]) == ("not comparable", "kill-worker")
    assert row["details"][0].startswith("two undisturbed runs differ, too. Call keras.utils.set_random_seed first")
    assert row["details"][1:] == ["the data: Shuffle without a seed"]


@pytest.mark.parametrize(
    ("flaw", "words"),
    [
        ("never", ["saved no backup that tfdist knows of", 'tfdist.callbacks.BackupAndRestore("backup")']),
        ("rarely", ["saved 1 backup before the last step. Expected: at least 3", "smaller save_freq"]),
        ("fails", ["the undisturbed run failed: exit code 3; see ", "logs/reference"]),
    ],
)
@pytest.mark.nightly
def test_nothing_to_compare_with(drill, flaw: str, words: list[str]) -> None:
    result = drill(flaws=[flaw]).finish(120)
    assert (result.code, result.out) == (1, "")
    assert all(word in result.err for word in words), result.err


@pytest.mark.nightly
def test_a_run_that_does_not_come_back(drill) -> None:
    started = drill("--timeout", "30", "--only", "kill-worker", flaws=["hangs"])
    result = started.finish(120)
    assert result.code == 1
    assert "kill-worker: failed\n  waited 30 s (--timeout) in vain for its end\n" in result.out
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_single_process(drill) -> None:
    result = drill("-n", "1", "--only", "kill-chief").finish(120)
    assert result.code == 0, result.err
    assert "  kill the chief " in result.out


@pytest.mark.parametrize(
    ("number", "code"),
    daily([(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], str(signal.SIGKILL)),
)
def test_nothing_outlives_a_drill_that_is_ended(drill, tmp_path, number: signal.Signals, code: int) -> None:
    started = drill("--only", "kill-chief", flaws=["stays"])
    log = tmp_path / "logs/kill-chief/events.jsonl"
    wait_until(lambda: log.exists() and '"saved"' in log.read_text(), 60, "a disturbed run that saves")
    os.kill(started.popen.pid, number)
    result = started.finish()
    assert result.code == code
    if number != signal.SIGKILL:
        assert f"tfdist: {number.name}: the drill and all that it has started are ended\n" in result.err
    started.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "flood"], "--only flood: expected one of kill-worker, kill-chief, hang, corrupt, truncate"),
        (["-n", "1", "--only", "kill-worker"], "--only kill-worker: expected one of kill-chief, hang"),
        (["-n", "0"], "0 is not in the range x>=1"),
    ],
)
def test_options_that_cannot_be(drill, options: list[str], words: str) -> None:
    result = drill(*options).finish()
    assert result.code == 2
    assert words in result.err


def test_no_script(launch) -> None:
    result = launch("", command=[sys.executable, "-m", "tfdist", "drill", "nowhere.py"]).finish()
    assert result.code == 2
    assert "nowhere.py: no such script in" in result.err
