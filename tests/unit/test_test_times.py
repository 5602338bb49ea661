"""`tools/test_times.py` adds up what pytest reports, and keeps `make test` within its budget."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools.test_times import Report, renewed, slowness

ROOT = Path(__file__).parents[2]
REPORT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" tests="4" time="{wall}">
<testcase classname="tests.unit.test_ports" name="test_many[1]" time="0.75"/>
<testcase classname="tests.unit.test_ports" name="test_many[2-a.B]" time="0.5"/>
<testcase classname="tests.unit.test_ports" name="test_quick" time="0.25"/>
<testcase classname="tests.cluster.test_saving.TestSaving" name="test_formats" time="2.0"/>
</testsuite></testsuites>"""


def run(folder: Path, wall: float, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test.xml").write_text(REPORT.format(wall=wall))
    command = [sys.executable, str(ROOT / "tools" / "test_times.py"), *options, str(folder / "test.xml")]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_cases_are_added_up(tmp_path: Path) -> None:
    done = run(tmp_path, 61.2)
    assert done.returncode == 0
    assert done.stdout.splitlines()[1:5] == [
        "test: 61 s. What took longest:",
        "     2.0 s    1 cases  tests/cluster/test_saving.py::TestSaving::test_formats",
        "     1.2 s    2 cases  tests/unit/test_ports.py::test_many",
        "     0.2 s    1 cases  tests/unit/test_ports.py::test_quick",
    ]


@pytest.mark.parametrize(("wall", "code"), [(600.0, 0), (600.5, 1)])
def test_the_budget(tmp_path: Path, wall: float, code: int) -> None:
    done = run(tmp_path, wall, "--limit", "600")
    assert done.returncode == code
    assert ("Expected: at most 600 s on two cores." in done.stdout) == bool(code)


def test_a_slow_machine_may_take_longer_but_a_slow_test_may_not() -> None:
    table = "\n".join(["run\tseconds\tcases\ttest", *(f"test\t10.0\t2\tt.py::test_{i}" for i in range(21))])

    def times(seconds: list[float], count: int = 2, name: str = "test") -> float:
        functions = {f"t.py::test_{i}": (s, count) for i, s in enumerate(seconds)}
        return slowness(Report(name, 0.0, functions), table)

    assert times([10.0] * 21) == times([5.0] * 21) == 1.0
    assert times([20.0] * 21) == 2.0
    # Nine that wait and twelve that compute; nine that have grown.
    assert times([10.0] * 9 + [30.0] * 12) == pytest.approx(450 / 210)
    assert times([10.0] * 12 + [900.0] * 9) == pytest.approx(300 / 210)
    # New cases, another run, and too few tell nothing.
    assert times([20.0] * 21, count=3) == times([20.0] * 21, name="rest") == times([20.0] * 10) == 1.0


def test_a_table_of_a_slow_machine_has_the_times_of_the_other_one() -> None:
    known = [f"test\t10.0\t2\tt.py::test_{i}" for i in range(11)]
    kept = "rest\t3.0\t1\tt.py::test_long"
    functions = {f"t.py::test_{i}": (25.0, 2) for i in range(11)} | {
        "n.py::test_new": (5.0, 1),
        "n.py::test_a": (1.0, 3),
    }
    table = renewed("\n".join(["run\tseconds\tcases\ttest", *known, kept]), [Report("test", 0.0, functions)])
    new = ["test\t0.4\t3\tn.py", "test\t2.0\t1\tn.py::test_new"]
    assert table.splitlines() == ["run\tseconds\tcases\ttest", kept, *new, *sorted(known)]


def test_the_table_names_tests_that_exist() -> None:
    """By file: a table that is never renewed would hand out new files last."""
    header, *lines = (ROOT / "tests" / "durations.tsv").read_text().splitlines()
    assert header == "run\tseconds\tcases\ttest"
    named = {line.split("\t")[3].split("::")[0] for line in lines}
    there = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")}
    assert sorted(named - there) == [], "make durations"
    assert len(named) > 0.8 * len(there), "make durations"
