"""Runs all that the gate leaves out, part by part: `python tools/nightly.py [PART…]`.

A red part does not stop the next one. At the end stands a table, also in build/reports/nightly.md: what was not run is
named as such. What each part printed is in build/reports/nightly-PART.log.

Example:
    make nightly                                # everything, about two hours on two cores
    make nightly PARTS="conformance mutations"  # these
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

REPORTS = Path("build/reports")
# Seconds that a part may take before it is ended and red (on a busy machine, too), and that its processes get to end.
_LIMIT, _GRACE = 9000, 30


@dataclasses.dataclass(frozen=True)
class Part:
    """One row of the table.

    Attributes:
        name: of the part.
        commands: for bash.
        report: the report of tools/run_tests.py that its tests leave; "" if it runs no pytest.
        cases, failed: regular expressions that find these numbers in what else it prints, the last match counts.
    """

    name: str
    commands: str
    report: str = ""
    cases: str = ""
    failed: str = ""


# The quick ones first: a night that is cut short has most of them.
PARTS = (
    Part("timing", "make test-timing", "timing"),
    Part("horovod", "make horovod && make test-horovod", "horovod"),
    Part("gpu", "make test-gpu ARGS=--stand-in", "gpu"),
    Part("slurm", "make test-slurm", "system"),
    Part("soak", "make soak SECONDS=300", cases=r"^identical: (\d+) faults", failed=r"^(failed): "),
    Part("mutations", "make mutations", cases=r"^\d+ of (\d+) found", failed=r"NOT FOUND|mistake in the record"),
    Part("commands", "make commands", cases=r"^\d+ of (\d+) commands", failed=r"^(\d+) of \d+ commands failed"),
    # The newest versions of everything, other random examples, and the time that `make test` may take.
    Part(
        "newest",
        "make lint docs test VENV=.venv-matrix/newest CONSTRAINTS= ARGS=--hypothesis-profile=random"
        " && .venv-matrix/newest/bin/python tools/test_times.py --limit 480 build/reports/test.xml",
        "test",
    ),
    Part("conformance", "make conformance", cases=r"^\| none \| (\d+)", failed=r"^(?:worse|better): "),
    Part("rest", "make test-rest", "rest"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """How a part has ended; `code` is None where it had to be ended."""

    code: int | None
    cases: str
    failed: str
    unstable: list[str]
    seconds: float


def main(arguments: list[str]) -> int:
    """Runs parts and prints the table; returns 0 if each of them ended with 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(names)}")
    chosen = parser.parse_args(arguments).parts or names
    if unknown := set(chosen) - set(names):
        parser.error(f"Received: {', '.join(sorted(unknown))}. Expected: {', '.join(names)}.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    REPORTS.mkdir(parents=True, exist_ok=True)
    rows: dict[str, Row] = {}
    for part in PARTS:
        if part.name in chosen:
            print(f"+ {part.name}: {part.commands}", flush=True)
            rows[part.name] = row = _run(part)
            print(f"  {'ended' if row.code is None else f'exit code {row.code}'} after {row.seconds:.0f} s", flush=True)
            # After each part: a night that is cut short has its table.
            (REPORTS / "nightly.md").write_text(table(rows))
    print(table(rows), end="")
    return int(any(row.code != 0 for row in rows.values()))


def table(rows: dict[str, Row]) -> str:
    """The table as Markdown, with what is unstable below it."""
    lines = ["| part | outcome | cases | failed | unstable | seconds |", "|---|---|--:|--:|--:|--:|"]
    for part in PARTS:
        if (row := rows.get(part.name)) is None:
            lines.append(f"| {part.name} | not run | | | | |")
            continue
        outcome = {0: "passed", None: "ended: it took too long"}.get(row.code, "RED")
        lines.append(
            f"| {part.name} | {outcome} | {row.cases} | {row.failed} | {len(row.unstable)} | {row.seconds:.0f} |"
        )
    unstable = [f"- UNSTABLE {test}" for row in rows.values() for test in row.unstable]
    return "\n".join([*lines, *([""] if unstable else []), *unstable]) + "\n"


def _run(part: Part) -> Row:
    """Runs a part in a process group of its own; what it printed stays in its log."""
    report, log = REPORTS / f"{part.report or '-'}.json", REPORTS / f"nightly-{part.name}.log"
    report.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", part.commands],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(_LIMIT)
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(_GRACE)
    seconds, text = time.monotonic() - began, log.read_text(errors="replace")
    if report.exists():
        found = json.loads(report.read_text())
        return Row(code, str(found["cases"]), str(len(found["failed"])), found["unstable"], seconds)
    return Row(code, _last(part.cases, text), _last(part.failed, text) or "0", [], seconds)


def _last(pattern: str, text: str) -> str:
    """The number that a pattern finds last; without a number in it, how often the pattern is found; "" if never."""
    found = re.findall(pattern, text, re.MULTILINE) if pattern else []
    if not found:
        return ""
    return found[-1] if found[-1].isdigit() else str(len(found))


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
