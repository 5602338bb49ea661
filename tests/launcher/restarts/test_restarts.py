"""Runs that go on after a failure: who is named, what is started again, and what is told about it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.launcher.training import events, of_kind, program

FAIL_ONCE = """
    if restart == 0:
        train(10)
        if index == 1: FAIL
        wait()
    train(20, resumed=8)
    print("ports", config["cluster"]["worker"])
"""


def fail_once(how: str) -> str:
    return program(FAIL_ONCE.replace("FAIL", how))


@pytest.mark.parametrize(
    ("how", "cause", "kind"),
    [
        ("kill()", "was killed by SIGKILL at step 10", "signal"),
        ("sys.exit(3)", "failed with exit code 3 at step 10", "exit"),
        (
            "raise ValueError('no such column')",
            r"failed with exit code 1 \(ValueError: no such column\) at step 10",
            "exit",
        ),
    ],
)
def test_a_failed_worker_is_replaced(launch, tmp_path, how: str, cause: str, kind: str) -> None:
    started = launch(fail_once(how))
    result = started.finish()
    assert result.code == 0, result.err
    line = rf"tfdist: worker 1 {cause}; restart 1 of 3: training again after \d\.\d s, 2 steps redone\n"
    assert re.fullmatch(r"tfdist: 2 workers on this machine; .*\n" + line, result.err)
    assert result.out.count("[worker 0] ports") == 1
    assert [event["event"] for event in events(tmp_path)] == [
        "start",
        "failure",
        "restart",
        "start",
        "training-again",
        "complete",
    ]
    (failure,) = of_kind(tmp_path, "failure")
    assert (failure["task"], failure["kind"], failure["step"]) == ("worker 1", kind, 10)
    (again,) = of_kind(tmp_path, "training-again")
    assert (again["restart"], again["resumed_step"], again["steps_redone"]) == (1, 8, 2)
    assert 0 < again["seconds"] < 5
    assert of_kind(tmp_path, "complete")[0]["restarts"] == 1
    first, second = of_kind(tmp_path, "start")
    assert set(first["processes"]) == set(second["processes"]) == {"worker 0", "worker 1"}
    assert not set(first["processes"].values()) & set(second["processes"].values())
    started.assert_nothing_is_left()


def test_the_chief_is_replaced_and_its_name_told(launch) -> None:
    script = """
        if restart == 0:
            train(5)
            if job == "chief": kill()
            wait()
        train(6, resumed=5)
    """
    result = launch(program(script), "--chief", "-n", "2").finish()
    assert result.code == 0, result.err
    assert "chief 0 was killed by SIGKILL at step 5; restart 1 of 3: training again after" in result.err
    assert " s, 0 steps redone\n" in result.err


def test_all_workers_killed_at_once(launch, tmp_path) -> None:
    script = "if restart == 0: train(10); kill()\n    train(12, resumed=10)"
    result = launch(program(script), "-n", "3").finish()
    assert result.code == 0, result.err
    assert re.search(r"worker [012] was killed by SIGKILL at step 10; restart 1 of 3: training again", result.err)
    assert len(of_kind(tmp_path, "failure")) == 1


def test_the_group_is_killed_at_once_even_if_it_ignores_sigterm(launch, tmp_path) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if restart == 0:
            train(10)
            if index == 1: kill()
            wait()
        train(12, resumed=10)
    """
    assert launch(program(script), "--grace", "30").finish().code == 0
    assert of_kind(tmp_path, "training-again")[0]["seconds"] < 1.5


def test_without_a_backup_everything_is_redone(launch) -> None:
    script = "if restart == 0 and index == 1: train(10); kill()\n    train(5)\n    if restart == 0: wait()"
    result = launch(program(script)).finish()
    assert result.code == 0
    assert " s, 10 steps redone: from the beginning, since no backup was resumed\n" in result.err


def test_logs_are_continued(launch) -> None:
    script = """
        print("life", restart, end="" if restart == 0 else chr(10))
        Path(f"{name}-{restart}").touch()
        while not all(Path(f"worker-{i}-{restart}").exists() for i in (0, 1)): time.sleep(0.01)
        train(10 + restart)
        if restart < 2 and index == 1: kill()
        if restart < 2: wait()
    """
    started = launch(program(script))
    assert started.finish().code == 0
    expected = "life 0\n--- restart 1 ---\nlife 1\n--- restart 2 ---\nlife 2\n"
    assert (started.log("worker-0"), started.log("worker-1")) == (expected, expected)


def test_logs_that_the_program_has_deleted_do_not_prevent_a_restart(launch) -> None:
    script = """
        import shutil
        train(10 + restart)
        if restart == 0 and index == 0:
            shutil.rmtree(os.environ["TFDIST_LOG_DIR"])
            kill()
        if restart == 0: wait()
    """
    started = launch(program(script))
    result = started.finish()
    assert result.code == 0, result.err
    assert "restart 1 of 3: training again after" in result.err
    assert started.log("worker-1") == "--- restart 1 ---\n"


def test_the_report_shows_the_last_life_only(launch) -> None:
    script = """
        print("life", restart)
        train(10 + restart)
        if index == 1: kill()
        wait()
    """
    result = launch(program(script), "--max-restarts", "1").finish()
    assert result.code == 137
    assert "its last lines:\n  life 1\ntfdist: its complete log" in result.err


def test_restarts_are_limited(launch, tmp_path) -> None:
    script = "train(10 + restart)\n    if index == 1: kill()\n    wait()"
    result = launch(program(script), "--max-restarts", "2").finish()
    assert result.code == 137
    assert re.findall(r"at step (\d+); restart (\d of \d): training again", result.err) == [
        ("10", "1 of 2"),
        ("11", "2 of 2"),
    ]
    assert "tfdist: not restarted: 2 restarts used up (--max-restarts)\n" in result.err
    assert "tfdist: worker 1 was killed by SIGKILL (exit code 137; " in result.err
    (end,) = of_kind(tmp_path, "gave-up")
    assert (end["exit_code"], end["reason"]) == (137, "not restarted: 2 restarts used up (--max-restarts)")


def test_no_restarts_on_request(launch, tmp_path) -> None:
    result = launch(fail_once("sys.exit(3)"), "--max-restarts", "0").finish()
    assert result.code == 3
    assert "restart" not in result.err
    assert [event["event"] for event in events(tmp_path)] == ["start", "failure", "gave-up"]


def test_the_same_step_twice_is_the_end(launch, tmp_path) -> None:
    script = "train(10, resumed=8 if restart else None)\n    if index == 1: raise ValueError('bad')\n    wait()"
    result = launch(program(script)).finish()
    assert result.code == 1
    assert "restart 1 of 3: training again after" in result.err
    assert "tfdist: not restarted: it failed at step 10 for the second time in a row\n" in result.err
    assert "\n  ValueError: bad\n" in result.err
    assert len(of_kind(tmp_path, "restart")) == 1


def test_failing_before_the_first_step_twice_is_the_end(launch, tmp_path) -> None:
    result = launch(program("writer.begin()\n    if index == 1: sys.exit(5)\n    wait()")).finish()
    assert result.code == 5
    headline = "tfdist: worker 1 failed with exit code 5; restart 1 of 3"
    assert f"{headline} in 1 s\n{headline}: ended before the training began again\n" in result.err
    assert "tfdist: not restarted: it failed before its first step for the second time in a row\n" in result.err
    assert of_kind(tmp_path, "restart")[0]["delay"] == 1.0


def test_what_never_reported_is_not_restarted(launch, tmp_path) -> None:
    result = launch(program("if index == 1: sys.exit(3)\n    wait()")).finish()
    assert result.code == 3
    assert "restart" not in result.err
    assert [event["event"] for event in events(tmp_path)] == ["start", "failure", "gave-up"]


def test_restarts_in_vain_are_made_less_and_less_often(launch, tmp_path) -> None:
    script = """
        if restart == 0: train(10)
        else:
            writer.begin()
            writer.resumed(restart)  # another step each time, but none is done
        if index == 1: kill()
        wait()
    """
    start = time.monotonic()
    result = launch(program(script)).finish()
    assert result.code == 137
    assert [event["delay"] for event in of_kind(tmp_path, "restart")] == [0.0, 1.0, 2.0]
    assert time.monotonic() - start > 3.0
    assert "restart 3 of 3 in 2 s\n" in result.err
    assert "tfdist: not restarted: 3 restarts used up (--max-restarts)\n" in result.err


def test_an_error_after_the_training_is_not_worth_another_one(launch) -> None:
    script = "train(10)\n    writer.report('done', 10)\n    if index == 1: raise NameError('typo')\n    wait()"
    result = launch(program(script)).finish()
    assert result.code == 1
    assert "tfdist: not restarted: the training had ended, what failed came after it\n" in result.err


def test_other_jobs_than_the_training_ones_end_the_run(launch) -> None:
    script = """
        if job == "evaluator":
            while not Path("worker-0").exists(): time.sleep(0.01)
            sys.exit(7)
        train(10)
        Path(name).touch()
        wait()
    """
    result = launch(program(script), "--evaluator").finish()
    assert result.code == 7
    assert "tfdist: not restarted: it is not one of the training processes\n" in result.err


def test_a_run_that_was_complete_before_the_failure(launch) -> None:
    script = """
        if restart == 0:
            train(10)
            if index == 1: kill()
            wait()
        writer.begin()
        writer.resumed(10)
        writer.report("done", 10)
    """
    result = launch(program(script)).finish()
    assert result.code == 0
    assert "worker 1 was killed by SIGKILL at step 10; restart 1 of 3: complete\n" in result.err


def test_nothing_outlives_a_launcher_that_is_killed_after_a_restart(launch) -> None:
    script = """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        train(10)
        if restart == 0 and index == 1: kill()
        if restart == 1: Path(name).touch()
        wait()
    """
    started = launch(program(script))
    started.wait_for_file("worker-0", "worker-1")
    assert len(started.marked()) == 1 + 1 + 2  # launcher, guardian, workers
    os.kill(started.popen.pid, signal.SIGKILL)
    started.popen.wait(5)
    started.assert_nothing_is_left(within=2.0)
