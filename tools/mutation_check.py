"""Breaks central functions of tfdist, one at a time, and shows that `make test` notices each time.

The mistakes are those of tools/mutations.py. They are made in a copy of the working tree.

Example:
    python tools/mutation_check.py                         # each with the quickest of the tests that must notice it
    python tools/mutation_check.py --each --only "sum of gradients"    # with each of these tests, one at a time
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from tfdist.launcher.operating_system import adopting_orphans  # noqa: E402
from tools.mutations import MUTATIONS, Mutation  # noqa: E402

FOUND, MISSED = "found", "NOT FOUND"
_FAILED = re.compile(r"^(?:FAILED|ERROR) ", re.MULTILINE)
# For one run of pytest; what hangs is given up by pytest itself before.
_LIMIT, _GRACE = 900.0, 20.0
_SHOWN_LINES = 40


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run of pytest has ended.

    Attributes:
        code: its exit code; `None` if it had to be ended.
        output: what it has printed.
    """

    code: int | None
    output: str

    @property
    def has_passed(self) -> bool:
        """Whether nothing failed, and not all was skipped."""
        return self.code == 0 and " passed" in self.output

    @property
    def verdict(self) -> str:
        """What that says about the tests, if something was broken."""
        if self.code is None:
            return f"{MISSED}: no end within the limit"
        if self.code == 1 and _FAILED.search(self.output):
            return FOUND
        return MISSED if self.has_passed else f"mistake in the record: exit code {self.code} of pytest"


class Tree:
    """A copy of the working tree in which things can be broken.

    Args:
        folder: where the copy is.
        limit: how many seconds a run of pytest may take.
    """

    def __init__(self, folder: Path, limit: float = _LIMIT) -> None:
        self._folder, self._limit = folder, limit
        self._good: set[str] = set()

    def run_pytest(self, *arguments: str) -> Ended:
        """Runs tests of the copy; whatever they have started ends with them."""
        environment = {**os.environ, "PYTHONPATH": str(self._folder), "PYTEST_ADDOPTS": ""}
        command = [sys.executable, "-m", "pytest", *arguments]
        spared = psutil.Process().children()
        with tempfile.TemporaryFile("w+") as output, adopting_orphans():
            process = subprocess.Popen(
                command, cwd=self._folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            code = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(self._limit)
            finally:
                _end(process, spared)
            output.seek(0)
            return Ended(code, output.read())

    def try_unbroken(self, tests: Sequence[str], pass_already: bool = False) -> None:
        """Runs tests without a mistake, all in one process: `check` need not run them again if they pass.

        Args:
            tests: their node ids.
            pass_already: whether that is known.
        """
        if pass_already or self.run_pytest(*dict.fromkeys(tests), "-q").has_passed:
            self._good.update(tests)

    def check(self, mutation: Mutation, *arguments: str) -> Ended:
        """Runs tests without and with a mistake.

        Args:
            mutation: the mistake.
            arguments: of pytest.

        Raises:
            ValueError: if the mutation does not fit the file, or the tests fail without it.
        """
        path = self._folder / mutation.file
        unbroken = path.read_text()
        broken = mutation.applied(unbroken)
        if arguments[0] not in self._good and not (ended := self.run_pytest(*arguments)).has_passed:
            raise ValueError(
                f"{ended.output}\nReceived: tests that fail without a mutation, or none that `make test` runs. "
                "Expected: tests that pass; name others in tools/mutations.py."
            )
        path.write_text(broken)
        try:
            return self.run_pytest(*arguments, "-x")
        finally:
            path.write_text(unbroken)


def _end(process: subprocess.Popen, spared: Sequence[psutil.Process]) -> None:
    """Ends a process and all below it, orphans too: all children of this one but those that were there before."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)  # tests then end what they have started
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)
    while left := [child for child in psutil.Process().children() if child not in spared]:
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in (child, *child.children(recursive=True)):
                    one.kill()
        psutil.wait_procs(left, timeout=1.0)


def copy_tree(folder: Path) -> None:
    """Copies what git knows, or would add, as it is now."""
    command = ["git", "-C", str(_ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")):
        if (_ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(_ROOT / name, folder / name)


def main(arguments: Sequence[str]) -> int:
    """Checks mutations, and prints what came of it; returns the exit code: 0 if all were found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="may be repeated")
    parser.add_argument("--tests-pass", action="store_true", help="`make test` has just passed: see mistakes only")
    parser.add_argument("--each", action="store_true", help="each of a mutation's tests by itself must notice it")
    options = parser.parse_args(arguments)
    chosen = [mutation for mutation in MUTATIONS if mutation.name in (options.only or names)]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tfdist-mutations-") as folder:
        copy_tree(Path(folder))
        tree = Tree(Path(folder))
        pairs = [(one, test) for one in chosen for test in (one.tests if options.each else one.tests[:1])]
        tree.try_unbroken([test for _, test in pairs], options.tests_pass)
        verdicts = [_report(tree, one, test) for one, test in pairs]
    print(f"{verdicts.count(FOUND)} of {len(verdicts)} found")
    return int(verdicts.count(FOUND) < len(verdicts))


def _report(tree: Tree, mutation: Mutation, test: str) -> str:
    began = time.monotonic()
    try:
        ended = tree.check(mutation, test, "-q")
        verdict, details = ended.verdict, ended.output
    except ValueError as error:
        verdict, details = "mistake in the record", str(error)
    print(f"{mutation.name:30} {verdict:10} {time.monotonic() - began:5.0f} s  {test}", flush=True)
    if verdict != FOUND:
        print("\n".join(details.splitlines()[-_SHOWN_LINES:]), flush=True)
    return verdict


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
