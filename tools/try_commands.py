"""Runs each command that README.md, CONTRIBUTING.md and `make help` name for a moment, as a newcomer types it.

What pytest sets (PYTHONPATH, say) is not there. A command that is a step of .ci/run or a part of the nightly run is not
repeated.

Example:
    make commands                              # all
    python tools/try_commands.py "make demo"   # one
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
# Seconds: a command that takes longer is not the short form of one.
_LIMIT, _GRACE = 400, 20
# The exit code where something cannot be installed: PyTorch is not on each index.
_SKIPPED = 77
_BENCH = "--peers tfdist --models mlp --variants '' --rounds 1 --windows 1 --steps 5 --warmup 5"

# By the beginning of the command; $OUT is an empty folder. `-n`: make says what it would do, and does nothing.
TRIED = {
    "make help": "make help",
    "make demo": 'make demo ARGS="--epochs 1 --model-path $OUT/digits.keras --backup-dir $OUT/demo"',
    "make bench": f'make .venv/.bench || exit {_SKIPPED}; make bench ARGS="{_BENCH}"',
    "make durations": "make -n durations",  # all tests again
    "make nightly": "make -n nightly",  # this is a part of it
    "make constraints": "make -n constraints",  # would change what .ci/run installs
    "make test-matrix": "make -n test-matrix",  # installs four versions of TensorFlow
    "make clean": "make -n clean",  # would remove what .ci/run needs
    "python tools/public_surface.py": "python tools/public_surface.py",
    "python tools/statements.py": "python tools/statements.py",
    "python tools/feature_matrix.py": "python tools/feature_matrix.py docs/features.md",
    "python tools/performance_tables.py": "python tools/performance_tables.py docs/{performance,fault-tolerance}.md",
    "tfdist run": "tfdist run -n 2 --log-dir $OUT/logs examples/train_digits.py "
    "--epochs 1 --model-path $OUT/digits.keras --backup-dir $OUT/run",
    "tfdist monitor": "tfdist monitor --once $OUT/logs",  # of the run before
    "tfdist goodput": "tfdist goodput $OUT/logs",
    "tfdist plan": "tfdist plan examples/train_digits.py",
    "tfdist submit": "tfdist submit --dry-run -n 2 examples/train_digits.py",
    "tfdist tune": "cd $OUT && tfdist tune -n 2 search.py",
}


def named(makefile: str, pages: str) -> set[str]:
    """The commands that a Makefile's help and pages name, each up to its first word that is an argument.

    Example:
        >>> sorted(named('help:\\n\\t@echo "make demo    train"', "    make test ARGS=1\\n`tfdist run -n 2 a.py` it"))
        ['make demo', 'make test', 'tfdist run']
    """
    found = re.findall(r'@echo "(make [a-z-]+)', makefile)
    code = re.findall(r"`([^`]+)`", re.sub(r"^```.*$", "", pages, flags=re.MULTILINE))
    code += re.findall(r"^(?:    |\$ )(.+)$", pages, re.MULTILINE)
    for text in code:
        found += re.findall(r"^(make [a-z-]+|tfdist [a-z]+|python\s+tools/\w+\.py)\b(?!=)", text)
    return {re.sub(r"\s+", " ", command) for command in found}


def main(only: list[str]) -> int:
    """Tries the commands that are named, or all; returns the exit code: 0 if each of them ended with 0."""
    failed = []
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tfdist-commands-") as out:
        (guide,) = re.findall(r"```python\n(.*?)```", (_ROOT / "docs/tuning.md").read_text(), re.DOTALL)[:1]
        short = guide.replace("max_trials=6", "max_trials=2").replace("epochs=5", "epochs=1")
        (Path(out) / "search.py").write_text(short)
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        environment = {**os.environ, "OUT": out, "PATH": path}
        environment.pop("PYTHONPATH", None)
        for command in only or TRIED:
            began = time.monotonic()
            code, said = _run(TRIED[command], environment)
            outcome = "skipped" if code == _SKIPPED else f"exit code {code}"
            print(f"{command:40} {outcome} after {time.monotonic() - began:4.0f} s", flush=True)
            if code not in (0, _SKIPPED):
                failed.append(command)
                print(said, flush=True)
    print(f"{len(failed)} of {len(only or TRIED)} commands failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _run(command: str, environment: dict[str, str]) -> tuple[int | None, str]:
    """The exit code of a command, `None` if it had to be ended, and what it has printed."""
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=_ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(_GRACE)
        output.seek(0)
        return code, output.read()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
