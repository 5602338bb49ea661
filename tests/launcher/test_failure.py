"""Runs in which a process fails, or cannot even be started. More of them, without processes, are in policy/."""

from __future__ import annotations

import subprocess
import sys


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


def test_a_traceback_is_printed_once_where_output_and_messages_go_to_one_place(launch) -> None:
    fails = "raise ValueError('no such column') if index == 0 else time.sleep(1000)"
    result = launch(fails, stderr=subprocess.STDOUT).finish()
    assert (result.code, result.out.count("ValueError: no such column")) == (1, 1)
    assert "tfdist: worker 0 failed with exit code 1; its last lines are above\n" in result.out
    # To a program that reads errors alone, it is told in full.
    result = launch(fails).finish()
    assert (result.err.count("ValueError: no such column"), result.out.count("ValueError: no such column")) == (1, 1)
