"""Runs in which a process fails: it is named, its exit code is returned, and the others are ended."""

from __future__ import annotations

import sys
import time

import pytest

IGNORE_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"


def test_exit_code_and_last_lines_of_the_failing_process(launch) -> None:
    script = """
        if index == 1:
            for number in range(40): print("step", number)
            time.sleep(0.3)
            sys.exit(3)
        time.sleep(60)
    """
    started = launch(script, "-n", "3")
    result = started.finish()
    assert result.code == 3
    assert "tfdist: worker 1 failed with exit code 3; its last lines:\n  step 20\n" in result.err
    assert "\n  step 39\ntfdist: its complete log: tfdist-logs/" in result.err
    assert result.err.endswith("/worker-1.log\n")
    assert "step 19" not in result.err
    started.assert_nothing_is_left()


def test_exception(launch) -> None:
    result = launch("if index == 1: raise ValueError('no such column')\ntime.sleep(60)").finish()
    assert result.code == 1
    assert "tfdist: worker 1 failed with exit code 1; its last lines:\n" in result.err
    assert "\n  ValueError: no such column\n" in result.err


def test_failing_chief(launch) -> None:
    result = launch("if index == 0:\n    print('last words', end='')\n    sys.exit(9)\ntime.sleep(60)").finish()
    assert result.code == 9
    assert result.out == "[worker 0] last words\n"
    assert "worker 0 failed with exit code 9; its last lines:\n  last words\n" in result.err


def test_killed_process(launch) -> None:
    result = launch("if index == 1: os.kill(os.getpid(), signal.SIGSEGV)\ntime.sleep(60)").finish()
    assert result.code == 139
    assert (
        "tfdist: worker 1 was killed by SIGSEGV (exit code 139); its last lines:\n  (it printed nothing)" in result.err
    )


def test_process_that_ignores_sigterm_is_killed_soon(launch) -> None:
    start = time.monotonic()
    script = f"""
        if index == 0: {IGNORE_SIGTERM}; Path("ready").touch()
        while not Path("ready").exists(): time.sleep(0.01)
        if index == 1: sys.exit(5)
        time.sleep(60)
    """
    started = launch(script, "--grace", "30")
    assert started.finish().code == 5
    assert 2.0 <= time.monotonic() - start < 6.0
    started.assert_nothing_is_left()


def test_consequence_that_ends_first_is_not_the_one_named(launch) -> None:
    script = """
        if index == 0:
            print("errors_impl.UnavailableError: Collective ops is aborted by: the peer is gone")
            sys.exit(1)
        time.sleep(0.5)
        raise ValueError("the culprit") if index == 1 else SystemExit(0)
    """
    result = launch(script).finish()
    assert result.code == 1
    assert "tfdist: worker 1 failed with exit code 1" in result.err
    assert "ValueError: the culprit" in result.err


def test_consequence_without_culprit_is_reported(launch) -> None:
    script = "if index == 1: print('UnavailableError: gone'); sys.exit(6)\ntime.sleep(60)"
    result = launch(script).finish()
    assert result.code == 6
    assert "worker 1 failed with exit code 6" in result.err


def test_later_failures_do_not_count(launch) -> None:
    script = """
        def stop(*_): sys.exit(8)
        signal.signal(signal.SIGTERM, stop)
        Path(name).touch()
        while not Path("worker-0").exists() or not Path("worker-1").exists(): time.sleep(0.01)
        if index == 1: sys.exit(4)
        time.sleep(60)
    """
    assert launch(script).finish().code == 4


def test_failing_parameter_server_and_evaluator(launch) -> None:
    for job in ("ps", "evaluator"):
        result = launch(f"if job == '{job}': sys.exit(7)\ntime.sleep(60)", "--ps", "1", "--evaluator").finish()
        assert result.code == 7
        assert f"{job} 0 failed with exit code 7" in result.err


def test_helpers_of_an_ended_process_do_not_remain(launch) -> None:
    started = launch("subprocess.Popen(['sleep', '60'])")
    assert started.finish().code == 0
    started.assert_nothing_is_left()


def test_helper_that_left_the_group_does_not_keep_the_launcher(launch) -> None:
    # It has the worker's output open, but does not belong to its group any more.
    started = launch("subprocess.Popen(['sleep', '5'], start_new_session=True); print('end')")
    start = time.monotonic()
    result = started.finish()
    assert (result.code, result.out) == (0, "[worker 0] end\n")
    assert time.monotonic() - start < 4


@pytest.mark.parametrize("leaves_the_group", [False, True])
def test_helper_that_keeps_printing_does_not_keep_the_launcher(launch, leaves_the_group: bool) -> None:
    script = f"""
        if index == 0:
            subprocess.Popen(["yes", "x" * 1000], start_new_session={leaves_the_group})
            time.sleep(0.3)
            sys.exit(3)
        time.sleep(60)
    """
    started = launch(script)
    result = started.finish(10)
    assert result.code == 3
    assert "tfdist: worker 0 failed with exit code 3; its last lines:\n" in result.err
    started.assert_nothing_is_left()


def test_process_that_deleted_its_logs_is_named(launch) -> None:
    script = """
        import shutil
        if index == 1:
            shutil.rmtree(os.environ["TFDIST_LOG_DIR"])
            print("no logs any more")
            sys.exit(3)
        time.sleep(60)
    """
    result = launch(script).finish()
    assert result.code == 3
    assert "tfdist: worker 1 failed with exit code 3; its last lines:\n  no logs any more\n" in result.err
    assert "Traceback" not in result.err


def test_command_that_cannot_be_executed(launch, tmp_path) -> None:
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF nonsense")
    program.chmod(0o755)
    started = launch("", command=[sys.executable, "-m", "tfdist", "run", "--", "./program"])
    result = started.finish()
    assert result.code == 1
    assert "Exec format error" in result.err
    assert "Traceback" not in result.err
    started.assert_nothing_is_left()
