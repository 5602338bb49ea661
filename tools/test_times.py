"""Where the time of the tests goes: `python tools/test_times.py [--write] [--limit SECONDS] REPORT…`.

A report is what `pytest --junitxml` writes; `make test` leaves build/reports/test.xml, and `make test-rest` rest.xml.
Prints the ten test functions that took longest, and how long each run took. --limit fails if one took longer.
Where the tests of tests/durations.tsv took longer than there, the run may take as much longer: the limit is about tests
that are new or have grown, not about the machine.
--write renews tests/durations.tsv, by which the tests are handed out: the files that take longest first. Times are
noted as the machine would have taken that made the table; a run without a report keeps its lines.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import re
import statistics
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "durations.tsv"
# What is quicker is added up by file.
_WORTH_A_LINE = 1.0
# What is quicker than that tells nothing of the machine, nor do a few.
_WORTH_COMPARING = 5.0
_FEW = 10


@dataclasses.dataclass(frozen=True)
class Report:
    """One run of pytest.

    Attributes:
        name: of the report: "test", "rest" or "system".
        wall: seconds from its beginning to its end.
        functions: seconds and number of cases by test function, such as "tests/unit/test_ports.py::test_reserve".
    """

    name: str
    wall: float
    functions: dict[str, tuple[float, int]]


def read(path: Path) -> Report:
    """Reads a report; what stands in it twice is added up."""
    (suite,) = ElementTree.parse(path).getroot().iter("testsuite")
    found: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
    for case in suite.iter("testcase"):
        if not case.get("classname"):
            continue  # a module that was skipped
        name = function_of(case.get("classname", ""), case.get("name", ""))
        seconds, count = found[name]
        found[name] = seconds + float(case.get("time", 0)), count + 1
    return Report(path.stem, float(suite.get("time", 0)), dict(found))


def function_of(classname: str, name: str) -> str:
    """The node id of a test function.

    Example:
        >>> function_of("tests.unit.test_ports.TestReserve", "test_many[3-a]")
        'tests/unit/test_ports.py::TestReserve::test_many'
    """
    *folders, module = re.match(r"[^A-Z]*(?=\.[A-Z]|$)", classname).group().split(".")
    classes = classname.split(".")[len(folders) + 1 :]
    return "::".join(["/".join([*folders, f"{module}.py"]), *classes, name.split("[")[0]])


def renewed(table: str, reports: list[Report]) -> str:
    """The table with other times: run, seconds, cases, test function, or its file for all of it that is quick.

    Args:
        table: as it was.
        reports: of the runs whose lines are made anew.
    """
    header, *before = table.splitlines()
    lines = [line for line in before if line.split("\t")[0] not in {report.name for report in reports}]
    for report in reports:
        times = slowness(report, table)
        found: dict[str, tuple[float, int]] = collections.defaultdict(lambda: (0.0, 0))
        for name, (seconds, count) in report.functions.items():
            place = name if seconds / times >= _WORTH_A_LINE else name.split("::")[0]
            so_far, counted = found[place]
            found[place] = so_far + seconds / times, counted + count
        lines += [f"{report.name}\t{took:.1f}\t{count}\t{name}" for name, (took, count) in sorted(found.items())]
    return "\n".join([header, *lines]) + "\n"


def slowness(report: Report, table: str) -> float:
    """How many times as long as in the table the tests took that stand in it, all together; at least 1.

    Tests that wait are hardly slower on a slow machine, and those that compute are: neither stands for all. One that
    has grown by itself counts as no more than twice as slow as half of them.

    Args:
        report: a run.
        table: what `--write` has written.
    """
    usually, ratios = [], []
    for run, usual, count, name in (line.split("\t") for line in table.splitlines()[1:]):
        seconds, now = report.functions.get(name, (0.0, 0))
        # One with other cases than it had is not the same test.
        if run == report.name and float(usual) >= _WORTH_COMPARING and now == int(count):
            usually.append(float(usual))
            ratios.append(seconds / float(usual))
    if len(ratios) <= _FEW:
        return 1.0
    most = 2 * statistics.median(ratios)
    return max(1.0, sum(min(one, most) * usual for one, usual in zip(ratios, usually, strict=True)) / sum(usually))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help=f"renew {TABLE.relative_to(ROOT)}")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="fail if one of the runs took longer")
    options = parser.parse_args()
    reports = [read(path) for path in options.reports]
    late, table = False, TABLE.read_text()
    if options.write:
        TABLE.write_text(renewed(table, reports))
    for report in reports:
        times = slowness(report, table)
        print(f"\n{report.name}: {report.wall:.0f} s. What took longest:")
        slowest = sorted(report.functions.items(), key=lambda item: -item[1][0])[:10]
        for name, (seconds, count) in slowest:
            print(f"{seconds:8.1f} s {count:4} cases  {name}")
        print(f"Slower than in {TABLE.relative_to(ROOT)} by a factor of {times:.2f} (at least 1).")
        if options.limit is not None and report.wall > options.limit * times:
            late = True
            print(
                f"Received: {report.wall:.0f} s for {report.name}. Expected: at most {options.limit * times:.0f} s on "
                "two cores. Make one of these quicker, or mark cases that others cover as `nightly`."
            )
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
