"""Runs pytest, and once more what failed: `python tools/run_tests.py NAME [--tries 2] PYTEST ARGUMENTS…`.

The second run is alone, in one process, and counts: the last lines name a test that passes then as UNSTABLE, and the
traceback of the first run stands above. More than five failures are no noise: they are not run again. Exit code 0 means
that everything passed in the end.

Leaves build/reports/NAME.xml, as pytest's --junitxml does, and build/reports/NAME.json with the number of cases and the
names of those that failed and that are unstable.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

REPORTS = Path("build/reports")
# More are no noise.
_MOST = 5
# Of pytest: tests ran, and some failed. Every other code but 0 says that it could not run them.
_TESTS_FAILED = 1


def main(arguments: list[str]) -> int:
    """Runs the tests, and prints what is unstable; returns the exit code."""
    name, *arguments = arguments
    tries = 2
    if arguments[:1] == ["--tries"]:
        tries, arguments = int(arguments[1]), arguments[2:]
    REPORTS.mkdir(parents=True, exist_ok=True)
    cache = REPORTS / f"{name}-cache"
    shutil.rmtree(cache, ignore_errors=True)
    report = REPORTS / f"{name}.xml"
    code = _pytest(arguments, cache, report)
    first = failed = _last_failed(cache)
    cases = ran(report)
    for _ in range(1, tries):
        if code != _TESTS_FAILED or not 0 < len(first) <= _MOST:
            break
        print(f"\nOnce more, alone: {', '.join(sorted(failed))}", flush=True)
        again = REPORTS / f"{name}-again.xml"
        once_more = ["-n", "0", "--last-failed", "--last-failed-no-failures=none"]
        code = _pytest([*arguments, *once_more], cache, again)
        if code == 0 and ran(again) < len(failed):
            print(f"Received: {ran(again)} tests that ran once more. Expected: {len(failed)}.")
            code = _TESTS_FAILED
            break
        failed = _last_failed(cache)
    unstable = sorted(first - failed) if code in (0, _TESTS_FAILED) else []
    result = {"cases": cases, "failed": sorted(failed if code else ()), "unstable": unstable}
    (REPORTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if len(first) > _MOST:
        print(f"{len(first)} tests failed: none was run again, since more than {_MOST} are no noise")
    for test in unstable:
        print(f"UNSTABLE {test}")
    return code


def _pytest(arguments: list[str], cache: Path, report: Path) -> int:
    options = ["-o", f"cache_dir={cache}", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    return subprocess.run([sys.executable, "-m", "pytest", *arguments, *options]).returncode


def _last_failed(cache: Path) -> set[str]:
    """The node ids that pytest has noted."""
    file = cache / "v/cache/lastfailed"
    return set(json.loads(file.read_text())) if file.exists() else set()


def ran(report: Path) -> int:
    """How many tests a report has that were not skipped; 0 without a report."""
    if not report.exists():
        return 0
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return sum(case.find("skipped") is None for case in cases)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
