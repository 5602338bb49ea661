"""Runs files of Keras' own tests, each in a process of its own with a deadline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The trainer, all callbacks, and Keras' own tests of strategies.
PATTERNS = ("trainers/trainer_test.py", "callbacks/*_test.py", "backend/tensorflow/*distribute*_test.py")
# Keras' own tests of keras.distribution, for `STRATEGIES["keras.distribution"]` alone.
DISTRIBUTION = "distribution/distribution_lib_test.py"
# The longest takes four minutes on an idle core, and on a slow one four times as long.
DEADLINE = 1800

Outcomes = dict[str, tuple[str, str]]


def keras_directory() -> Path:
    """Where the installed Keras is; without importing it."""
    return Path(find_spec("keras").submodule_search_locations[0]) / "src"


def files() -> list[Path]:
    """The files of tests, the longest first."""
    found = [path for pattern in PATTERNS for path in keras_directory().glob(pattern)]
    return sorted(found, key=lambda path: -path.stat().st_size)


def run_file(path: Path, strategy: str, options: Sequence[str] = ()) -> Outcomes:
    """Runs a file of tests in the scope of a strategy.

    Args:
        path: the file.
        strategy: a key of `tests.conformance.in_scope.STRATEGIES`.
        options: for pytest, `-k` for one.

    Returns:
        By test, `(outcome, reason)`; the outcome is "passed", "failed" or "skipped". A file that cannot be imported, or
        does not end in time, counts as one failed test more.
    """
    with tempfile.TemporaryDirectory() as place:
        outcomes, log = Path(place, "outcomes"), Path(place, "log")
        environment = {
            **os.environ,
            "CONFORMANCE_STRATEGY": strategy,
            "CONFORMANCE_OUTCOMES": str(outcomes),
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        # Nothing of this project's configuration, and its plugins.
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-c", os.devnull, f"--rootdir={path.parent}"]
        command += ["-p", "tests.conformance.in_scope", "-p", "no:cacheprovider", "-p", "no:xdist", *options, str(path)]
        with log.open("w") as output:
            child = subprocess.Popen(
                command, env=environment, cwd=place, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = child.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # TensorFlow swallows SIGTERM.
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        lines = [json.loads(line) for line in outcomes.read_text().splitlines()] if outcomes.exists() else []
        found = {line["test"]: (line["outcome"], line["reason"]) for line in lines}
        # 1: some failed. 5: none was selected.
        if code not in (0, 1, 5):
            end = "did not end in time" if code is None else f"ended with code {code}"
            found[f"{path.name}::(all)"] = ("failed", f"{end}: {log.read_text()[-3000:]}")
        return found
