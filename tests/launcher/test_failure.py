"""Runs in which a process fails, or cannot even be started. More of them, without processes, are in policy/."""

from __future__ import annotations

import sys


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
