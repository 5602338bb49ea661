"""Runs all that the gate leaves out, part by part: `python tools/nightly.py [PART…]`.

A red part does not stop the next one. Parts that keep one core busy run two at a time. At the end stands a table, also
in build/reports/nightly.md: what was not run is named as such. What each part printed is in
build/reports/nightly-PART.log.

Example:
    make nightly                                # everything, 2 to 3 hours on two cores
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
_CORES = 2
# Seconds between two looks at what runs.
_LOOK = 0.2


@dataclasses.dataclass(frozen=True)
class Part:
    """One row of the table.

    Attributes:
        name: of the part.
        commands: for bash.
        report: the report of tools/run_tests.py that its tests leave; "" if it runs no pytest.
        cases, failed: regular expressions that find these numbers in what else it prints, the last match counts.
        cores: that it keeps busy: 1 or 2.
    """

    name: str
    commands: str
    report: str = ""
    cases: str = ""
    failed: str = ""
    cores: int = _CORES


# The quick ones first: a night that is cut short has most of them.
PARTS = (
    Part("timing", "make test-timing", "timing"),
    Part("horovod", "make horovod && make test-horovod", "horovod"),
    # The longest of these four first, so that both cores are done at the same time.
    Part(
        "mutations", "make mutations", cases=r"^\d+ of (\d+) found", failed=r"NOT FOUND|mistake in the record", cores=1
    ),
    Part("gpu", "make test-gpu ARGS=--stand-in", "gpu", cores=1),
    Part("slurm", "make test-slurm", "system", cores=1),
    Part("soak", "make soak SECONDS=300", cases=r"^identical: (\d+) faults", failed=r"^(failed): ", cores=1),
    Part("commands", "make commands", cases=r"^\d+ of (\d+) commands", failed=r"^(\d+) of \d+ commands failed"),
    # The newest versions of everything, other random examples, and the time that `make test` may take.
    Part(
        "newest",
        "make lint docs VENV=.venv-matrix/newest CONSTRAINTS="
        " && make test VENV=.venv-matrix/newest CONSTRAINTS= ARGS=--hypothesis-profile=random"
        " && .venv-matrix/newest/bin/python tools/test_times.py --limit 720 build/reports/test.xml",
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
    waiting, running = [part for part in PARTS if part.name in chosen], list[_Running]()
    try:
        while waiting or running:
            while waiting and sum(one.part.cores for one in running) + waiting[0].cores <= _CORES:
                running.append(_Running(waiting.pop(0)))
            time.sleep(_LOOK)
            for one in [one for one in running if one.is_over()]:
                running.remove(one)
                rows[one.part.name] = row = one.end()
                outcome = "ended" if row.code is None else f"exit code {row.code}"
                print(f"  {one.part.name}: {outcome} after {row.seconds:.0f} s", flush=True)
                # After each part: a night that is cut short has its table.
                (REPORTS / "nightly.md").write_text(table(rows))
    finally:
        for one in running:
            one.end()
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


class _Running:
    """A part in a process group of its own; what it prints stays in its log."""

    def __init__(self, part: Part) -> None:
        print(f"+ {part.name}: {part.commands}", flush=True)
        self.part = part
        self._report, self._log = REPORTS / f"{part.report or '-'}.json", REPORTS / f"nightly-{part.name}.log"
        self._report.unlink(missing_ok=True)
        self._began = time.monotonic()
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", part.commands],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_over(self) -> bool:
        """Whether it has ended by itself, or has to be ended."""
        return self._process.poll() is not None or time.monotonic() - self._began > _LIMIT

    def end(self) -> Row:
        """Ends what is left of it, and reads how it went."""
        code, seconds = self._process.poll(), time.monotonic() - self._began
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(self._process.pid, number)
                self._process.wait(_GRACE)
        text = self._log.read_text(errors="replace")
        if self._report.exists():
            found = json.loads(self._report.read_text())
            return Row(code, str(found["cases"]), str(len(found["failed"])), found["unstable"], seconds)
        return Row(code, _last(self.part.cases, text), _last(self.part.failed, text) or "0", [], seconds)


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
