"""Runs that go on after a failure. When they do, and what is told about it, is in policy/, without processes."""

from __future__ import annotations

import re

from tests.launcher.training import events, of_kind, program


def fails_once(how: str) -> str:
    """Workers that train until the last one fails; those of the next life take the training up again."""
    return program(
        f"""
        workers = len(config["cluster"]["worker"])
        if restart == 0:
            train(10)
            if index == workers - 1: {how}
            wait()
        train(20, resumed=8)
        print("workers", workers)
        """
    )


def test_a_killed_worker_is_replaced(launch, tmp_path) -> None:
    started = launch(fails_once("kill()"))
    result = started.finish()
    assert (result.code, result.out) == (0, "[worker 0] workers 2\n"), result.err
    assert re.fullmatch(
        r"tfdist: 2 workers on this machine; .*\n"
        r"tfdist: worker 1 was killed by SIGKILL at step 10; restart 1 of 3\n"
        r"tfdist: restart 1 of 3: training again after \d+\.\d s, "
        r"2 steps redone\n",
        result.err,
    )
    assert [event["event"] for event in events(tmp_path)] == [
        "start",
        "failure",
        "restart",
        "start",
        "training-again",
        "complete",
    ]
    assert of_kind(tmp_path, "training-again")[0]["seconds"] > 0
    first, second = of_kind(tmp_path, "start")
    assert not set(first["processes"].values()) & set(second["processes"].values())
    assert started.log("worker-1") == "--- restart 1 ---\nworkers 2\n"
    started.assert_nothing_is_left()


def test_a_stopped_process_is_named(launch, tmp_path) -> None:
    started = launch(fails_once("os.kill(os.getpid(), signal.SIGSTOP)"), "--hang-timeout", "10")
    result = started.finish()
    assert result.code == 0, result.err
    assert re.search(
        r"tfdist: worker 1 is stopped \(process state T\): no progress for \d\d(\.\d+)? s \(--hang-timeout\); "
        r"restart 1 of 3\ntfdist: restart 1 of 3: training again after \d+\.\d s, 2 steps redone\n",
        result.err,
    )
    (failure,) = of_kind(tmp_path, "failure")
    assert (failure["kind"], failure["exit_code"], failure["step"]) == ("hang", 124, 10)
    started.assert_nothing_is_left()
