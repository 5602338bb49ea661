"""Breaks central functions of tfdist, one at a time, and shows that `make test` notices each time.

The mistakes are those of tools/mutations.py. They are made in a copy of the working tree.

Example:
    python tools/mutation_check.py                         # each with the quickest of the tests that must notice it
    python tools/mutation_check.py --each                  # with each of these tests, one at a time
    python tools/mutation_check.py --whole --only "sum of gradients"    # with all of `make test`
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
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
# Notices every mutation, since there the old text is gone.
_OWN_TEST = "tests/unit/test_mutation_check.py"
_MAKE_TEST = re.compile(r'^pytest = "\$\(1\)" -m pytest (.+)$', re.MULTILINE)
_FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
# For one run of pytest; what hangs is given up by pytest itself before.
_LIMIT, _LIMIT_WHOLE = 900.0, 2 * 3600.0
_GRACE = 20.0
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
    def failed(self) -> str:
        """The first test that failed; empty if none did."""
        found = _FAILED.search(self.output)
        return found[1] if found else ""

    @property
    def has_passed(self) -> bool:
        """Whether nothing failed, and not all was skipped."""
        return self.code == 0 and " passed" in self.output

    @property
    def verdict(self) -> str:
        """What that says about the tests, if something was broken."""
        if self.code is None:
            return f"{MISSED}: no end within the limit"
        # With pytest-xdist, -x ends as an interrupt does.
        if self.failed and (self.code == 1 or (self.code == 2 and "stopping after 1 failures" in self.output)):
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
        # Mutations that the same tests have to notice share the run without one.
        self._unbroken = functools.cache(self.run_pytest)

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
        if not (ended := self._unbroken(*arguments)).has_passed:
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


def arguments_of_make_test(makefile: str) -> list[str]:
    """The arguments that `make test` gives pytest.

    Example:
        >>> arguments_of_make_test('pytest = "$(1)" -m pytest -n $(WORKERS) tests\\n')
        ['-n', '2', 'tests']
    """
    (found,) = _MAKE_TEST.findall(makefile)
    return found.replace("$(WORKERS)", "2").split()


def main(arguments: Sequence[str]) -> int:
    """Checks mutations, and prints what came of it; returns the exit code: 0 if all were found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this mutation; may be repeated")
    parser.add_argument("--list", action="store_true", help="print the mutations, and do nothing")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--each", action="store_true", help="each of a mutation's tests by itself must notice it")
    how.add_argument("--whole", action="store_true", help="run all of `make test`, for each mutation")
    options = parser.parse_args(arguments)
    if unknown := set(options.only or ()) - {mutation.name for mutation in MUTATIONS}:
        parser.error(f"no mutation is called {', '.join(map(repr, sorted(unknown)))}; --list names all")
    chosen = [mutation for mutation in MUTATIONS if not options.only or mutation.name in options.only]
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name} ({mutation.file}): {mutation.effect}")
        return 0
    whole = [*arguments_of_make_test((_ROOT / "Makefile").read_text()), f"--ignore={_OWN_TEST}"]
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tfdist-mutations-") as folder:
        copy_tree(Path(folder))
        tree = Tree(Path(folder), _LIMIT_WHOLE if options.whole else _LIMIT)
        verdicts = []
        for mutation in chosen:
            for test in mutation.tests if options.each else mutation.tests[:1]:
                verdicts.append(_report(tree, mutation, whole if options.whole else [test]))
    print(f"{verdicts.count(FOUND)} of {len(verdicts)} found")
    return int(verdicts.count(FOUND) < len(verdicts))


def _report(tree: Tree, mutation: Mutation, arguments: Sequence[str]) -> str:
    began = time.monotonic()
    try:
        ended = tree.check(mutation, *arguments, "-q")
        verdict, details = ended.verdict, ended.output
    except ValueError as error:
        ended, verdict, details = Ended(None, ""), "mistake in the record", str(error)
    where = ended.failed or " ".join(arguments)
    print(f"{mutation.name:30} {verdict:10} {time.monotonic() - began:5.0f} s  {where}", flush=True)
    if verdict != FOUND:
        print("\n".join(details.splitlines()[-_SHOWN_LINES:]), flush=True)
    return verdict


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
