"""The evaluator, which may outlast the training by the grace period."""

from __future__ import annotations

import signal
import time

WATCH_FOR_EVER = """
    def stop(*_):
        print("stopped")
        sys.exit(0)
    if job == "evaluator":
        signal.signal(signal.SIGTERM, stop)
        Path(name).touch()
        time.sleep(60)
    while not Path("evaluator-0").exists(): time.sleep(0.01)
"""


def test_evaluator_that_never_ends_is_stopped_after_the_grace_period(launch) -> None:
    start = time.monotonic()
    started = launch(WATCH_FOR_EVER, "--evaluator", "--ps", "1", "--grace", "1")
    result = started.finish(15)
    assert result.code == 0
    assert time.monotonic() - start >= 1.0
    assert (
        "tfdist: the evaluator still runs 1 s after the end of the training and is stopped now; "
        "a longer --grace gives it more time\n"
    ) in result.err
    assert started.log("evaluator-0") == "stopped\n"
    started.assert_nothing_is_left()


def test_evaluator_that_ends_within_the_grace_period_is_left_alone(launch) -> None:
    script = "if job == 'evaluator':\n    time.sleep(1)\n    print('evaluated')\nelif job == 'ps': time.sleep(60)"
    started = launch(script, "--evaluator", "--ps", "1", "--grace", "20")
    result = started.finish(15)
    assert result.code == 0
    assert "the evaluator still runs" not in result.err
    assert started.log("evaluator-0") == "evaluated\n"


def test_evaluator_that_fails_after_the_training_fails_the_run(launch) -> None:
    result = launch("if job == 'evaluator':\n    time.sleep(1)\n    sys.exit(5)", "--evaluator").finish()
    assert result.code == 5
    assert "tfdist: evaluator 0 failed with exit code 5" in result.err


def test_interrupted_evaluator_keeps_its_grace_period(launch) -> None:
    script = """
        def save(*_):
            time.sleep(2)
            print("saved")
            sys.exit(0)
        if job == "evaluator":
            signal.signal(signal.SIGINT, save)
            Path(name).touch()
            time.sleep(60)
    """
    started = launch(script, "-n", "1", "--evaluator", "--grace", "3")
    started.wait_for_file("evaluator-0")
    time.sleep(1.5)  # so that the grace period after the training ends while the evaluator saves
    started.popen.send_signal(signal.SIGINT)
    assert started.finish(15).code == 0
    assert started.log("evaluator-0") == "saved\n"
