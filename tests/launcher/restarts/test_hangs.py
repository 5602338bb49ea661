"""Processes that stand still: the launcher notices, names the right one and starts all of them again."""

from __future__ import annotations

import re
import time

from tests.launcher.training import of_kind, program


def hang_once(how: str) -> str:
    return program(
        f"""
    if restart == 0:
        train(10 - index)
        if index == 1: {how}
        wait()
    train(20, resumed=8)
"""
    )


def test_a_stopped_process_is_named(launch, tmp_path) -> None:
    script = hang_once("os.kill(os.getpid(), signal.SIGSTOP)")
    started = launch(script, "--hang-timeout", "1")
    result = started.finish()
    assert result.code == 0, result.err
    assert re.search(
        r"tfdist: worker 1 is stopped \(process state T\): no progress for 1(\.\d+)? s \(--hang-timeout\); "
        r"restart 1 of 3: training again after \d\.\d s, 2 steps redone\n",
        result.err,
    )
    (failure,) = of_kind(tmp_path, "failure")
    assert (failure["kind"], failure["exit_code"], failure["step"]) == ("hang", 124, 9)
    started.assert_nothing_is_left()


def test_the_process_that_is_behind_is_named(launch) -> None:
    result = launch(hang_once("wait()"), "--hang-timeout", "1").finish()
    assert result.code == 0, result.err
    assert "tfdist: worker 1 stands still at step 9 while others have reached step 10: no progress for 1" in result.err


def test_a_process_that_never_joins_is_named(launch) -> None:
    script = """
        if restart == 0:
            if index == 0: writer.begin()
            wait()
        train(20)
    """
    result = launch(program(script), "--start-timeout", "1").finish()
    assert result.code == 0, result.err
    headline = r"tfdist: worker 1 has not begun to train: no progress for 1(\.\d+)? s \(--start-timeout\)"
    assert re.search(headline + r"; restart 1 of 3 in 1 s\n", result.err)
    assert re.search(headline + r"; restart 1 of 3: training again", result.err)


def test_a_restarted_run_that_never_begins_is_ended(launch) -> None:
    started = launch(program("if restart == 0: train(3); kill()\n    wait()"), "--start-timeout", "1")
    start = time.monotonic()
    result = started.finish()
    assert result.code == 124
    assert time.monotonic() - start < 8
    assert "worker 0 has not begun to train: no progress for 1" in result.err
    started.assert_nothing_is_left()


def test_a_hang_that_repeats_itself_is_the_end(launch) -> None:
    started = launch(program("train(10 - index)\n    wait()"), "--hang-timeout", "0.5")
    result = started.finish()
    assert result.code == 124
    assert "tfdist: not restarted: it failed at step 9 for the second time in a row\n" in result.err
    assert "tfdist: worker 1 stands still at step 9 while others" in result.err
    started.assert_nothing_is_left()


def test_an_elastic_run_goes_on_without_a_hung_process(launch, tmp_path) -> None:
    result = launch(hang_once("wait()"), "-n", "1:2", "--hang-timeout", "1").finish()
    assert result.code == 0, result.err
    assert "restart 1 of 3 with 1 worker: training again" in result.err
    assert [event["workers"] for event in of_kind(tmp_path, "start")] == [2, 1]


def test_a_program_that_does_not_train_is_not_watched(launch) -> None:
    result = launch(program("time.sleep(1.5)"), "--hang-timeout", "0.2", "--start-timeout", "0.2").finish()
    assert result.code == 0


def test_what_comes_after_the_training_is_not_watched(launch) -> None:
    script = "train(3)\n    writer.report('done', 3)\n    time.sleep(1.5)"
    assert launch(program(script), "--hang-timeout", "0.3").finish().code == 0
