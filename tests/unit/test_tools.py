"""Tools: durations, tiers, commands that are tried, mutations."""

from __future__ import annotations

import ast
import re
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.tiers import daily
from tests.unit.pages import read
from tools import statements, test_times, try_commands
from tools.mutation_check import FOUND, MISSED, Ended, Tree
from tools.mutations import MUTATIONS, Mutation
from tools.nightly import PARTS
from tools.try_commands import TRIED, named

ROOT = Path(__file__).parents[2]
REPORT = """<?xml version="1.0"?><testsuites><testsuite name="pytest" tests="4" time="{wall}">
<testcase classname="tests.unit.test_ports" name="test_many[1]" time="0.75"/>
<testcase classname="tests.unit.test_ports" name="test_many[2-a.B]" time="0.5"/>
<testcase classname="tests.cluster.test_saving.TestSaving" name="test_formats" time="2.0"/>
</testsuite></testsuites>"""


@pytest.mark.parametrize(("wall", "code"), [(600.0, 0), (600.5, 1)])
def test_times_and_their_budget(tmp_path, monkeypatch, capsys, wall: float, code: int) -> None:
    (tmp_path / "test.xml").write_text(REPORT.format(wall=wall))
    monkeypatch.setattr(sys, "argv", ["test_times.py", "--limit", "600", str(tmp_path / "test.xml")])
    assert test_times.main() == code
    said = capsys.readouterr().out
    assert said.splitlines()[2:4] == [
        "     2.0 s    1 cases  tests/cluster/test_saving.py::TestSaving::test_formats",
        "     1.2 s    2 cases  tests/unit/test_ports.py::test_many",
    ]
    assert ("Expected: at most 600 s on two cores." in said) == bool(code)


def test_a_slow_machine_may_take_longer_but_a_slow_test_may_not() -> None:
    table = "\n".join(["run\tseconds\tcases\ttest", *(f"test\t10.0\t2\tt.py::test_{i}" for i in range(21))])

    def times(seconds: list[float], count: int = 2, name: str = "test") -> float:
        functions = {f"t.py::test_{i}": (s, count) for i, s in enumerate(seconds)}
        return test_times.slowness(test_times.Report(name, 0.0, functions), table)

    assert times([10.0] * 21) == times([5.0] * 21) == 1.0
    assert times([20.0] * 21) == 2.0
    # Nine that wait and twelve that compute; nine that have grown.
    assert times([10.0] * 9 + [30.0] * 12) == pytest.approx(450 / 210)
    assert times([10.0] * 12 + [900.0] * 9) == pytest.approx(300 / 210)
    # New cases, another run, and too few tell nothing.
    assert times([20.0] * 21, count=3) == times([20.0] * 21, name="rest") == times([20.0] * 10) == 1.0


def test_the_table_names_tests_that_exist() -> None:
    """By file: a table that is never renewed would hand out new files last."""
    header, *lines = (ROOT / "tests" / "durations.tsv").read_text().splitlines()
    assert header == "run\tseconds\tcases\ttest"
    named = {line.split("\t")[3].split("::")[0] for line in lines}
    there = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py")}
    assert sorted(named - there) == [], "make durations"
    assert len(named) > 0.8 * len(there), "make durations"


def test_cases_that_are_not_daily_are_marked() -> None:
    cases = daily(["a", ("b", 1), pytest.param("c", id="d")], "a", "d")
    assert [bool(case.marks) for case in cases] == [False, True, False]


@pytest.mark.parametrize(
    ("cases", "problem"),
    [(["a"], r"Received: \['b'\]. Expected: ids"), ([("b", 1), ("b", 2)], "Received: two cases 'b'")],
)
def test_a_case_that_is_not_there_or_twice_is_refused(cases: list, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        daily(cases, "b")


def test_statements_are_counted_without_docstrings(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Text."""\nif True:\n    a = 1\n    """A string."""\n')
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.py").write_text("a = 1; b = 2")
    assert statements.counts(tmp_path) == {"": 2, "sub": 2}


# What the gate or the nightly run does anyway.
STEPS = set(re.findall(r"\brun (make [a-z-]+)", read(".ci/run")))
STEPS |= set(re.findall(r"make [a-z-]+", " ".join(part.commands for part in PARTS)))


def test_each_command_that_is_named_is_tried():
    commands = named(read("Makefile"), read("README.md") + read("CONTRIBUTING.md"))
    assert {"make soak", "make bench", "make test", "tfdist tune", "python tools/public_surface.py"} <= commands
    assert commands - STEPS - set(TRIED) == set()
    assert set(TRIED) <= commands
    assert set(TRIED) & STEPS == set(), "twice"
    assert "make commands" in STEPS and "tools/try_commands.py" in read("Makefile")


def test_commands_that_fail_are_named_with_their_output(monkeypatch, capsys):
    program = f"{sys.executable} -c \"import os, sys; sys.exit(os.environ.get('PYTHONPATH') or 'of a mistake')\""
    trials = {"make bad": program, "make good": "test -d $OUT", "make worse": "exit 3"}
    monkeypatch.setattr(try_commands, "TRIED", trials)
    assert try_commands.main(["make good"]) == 0
    assert try_commands.main([]) == 1
    said = capsys.readouterr().out
    assert "of a mistake" in said
    assert "2 of 3 commands failed: make bad, make worse" in said
    monkeypatch.setattr(try_commands, "TRIED", {"make long": "sleep 600"})
    monkeypatch.setattr(try_commands, "_LIMIT", 1)
    assert try_commands.main([]) == 1
    assert "1 of 1 commands failed: make long" in capsys.readouterr().out


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_record_is_up_to_date(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    assert ast.dump(ast.parse(mutation.applied(text))) != ast.dump(ast.parse(text))
    for test in mutation.tests:
        path, *names = test.partition("[")[0].split("::")
        definitions = {getattr(node, "name", "") for node in ast.walk(ast.parse((ROOT / path).read_text()))}
        assert definitions.issuperset(names), f"{test} is not there"


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (1, "ERROR test_a.py::test_b - OSError: its fixture\n1 error", FOUND),
        (0, "2 passed, 1 skipped", MISSED),
        (0, "1 skipped", "mistake in the record: exit code 0 of pytest"),
        (2, "ERROR test_a.py - SyntaxError: no", "mistake in the record: exit code 2 of pytest"),
    ],
)
def test_verdicts(code: int, output: str, verdict: str) -> None:
    assert Ended(code, output).verdict == verdict


@pytest.mark.nightly
def test_a_mistake_is_made_found_and_undone(tmp_path: Path) -> None:
    """One of the tests starts a process, which hangs where the program does not double."""
    program, triples = tmp_path / "double.py", Mutation("factor", "triples", "double.py", "2 * x", "3 * x", ())
    program.write_text("def double(x): return 2 * x\n")
    tests = """
        import subprocess, sys
        from double import double
        def test_one(): assert double(1) == 2
        def test_wrong(): assert double(1) == 3
        def test_process():
            code = "import double, time\\nif double.double(1) == 3: time.sleep(1000)"
            assert subprocess.Popen([sys.executable, "-c", code], cwd="/", start_new_session=True).wait() == 0
    """
    (tmp_path / "test_double.py").write_text(textwrap.dedent(tests))
    tree, quiet = Tree(tmp_path, limit=60.0), ("-q", "-p", "no:cacheprovider")
    with pytest.raises(ValueError, match="tests that fail without a mutation, or none"):
        tree.check(triples, "test_double.py::test_wrong", *quiet)
    assert tree.check(triples, "test_double.py::test_one", *quiet).verdict == FOUND
    assert program.read_text() == "def double(x): return 2 * x\n"
    with pytest.raises(ValueError, match=r"double.py, which has the old text of mutation 'factor' 0 times"):
        triples.applied("4 * x")
    before = psutil.Process().children()
    program.write_text("def double(x): return 3 * x\n")
    ended = Tree(tmp_path, limit=3.0).run_pytest("test_double.py::test_process", *quiet)
    assert ended.verdict == f"{MISSED}: no end within the limit"
    assert psutil.Process().children() == before
