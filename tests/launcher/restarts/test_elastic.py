"""Runs that go on with fewer workers."""

from __future__ import annotations

import re

from tests.launcher.training import of_kind, program

SHRINK = """
    workers = len(config["cluster"]["worker"])
    if restart < LOSSES:
        train(10 + restart)
        if index == workers - 1: FAIL
        wait()
    train(20, resumed=8)
    print("workers", workers)
"""


def shrink(losses: int, how: str) -> str:
    return program(SHRINK.replace("LOSSES", str(losses)).replace("FAIL", how))


def test_an_elastic_run_goes_on_with_one_fewer(launch, tmp_path) -> None:
    started = launch(shrink(1, "kill()"), "-n", "1:3")
    result = started.finish()
    assert (result.code, result.out) == (0, "[worker 0] workers 2\n")
    assert re.search(
        r"worker 2 was killed by SIGKILL at step 10; restart 1 of 3 with 2 workers: training again after .* 2 steps",
        result.err,
    )
    assert [event["workers"] for event in of_kind(tmp_path, "start")] == [3, 2]
    started.assert_nothing_is_left()


def test_an_elastic_run_does_not_shrink_below_its_minimum(launch, tmp_path) -> None:
    result = launch(shrink(2, "kill()"), "-n", "2:3").finish()
    assert (result.code, result.out) == (0, "[worker 0] workers 2\n")
    assert [event["workers"] for event in of_kind(tmp_path, "start")] == [3, 2, 2]


def test_an_exception_does_not_cost_a_worker(launch, tmp_path) -> None:
    result = launch(shrink(1, "sys.exit(3)"), "-n", "1:3").finish()
    assert (result.code, result.out) == (0, "[worker 0] workers 3\n")
    assert [event["workers"] for event in of_kind(tmp_path, "start")] == [3, 3]
