"""The mutations are up to date, and the tool that checks them tells what is found from what is not."""

from __future__ import annotations

import ast
import contextlib
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tools.mutation_check import FOUND, MISSED, Ended, Tree, arguments_of_make_test
from tools.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).parents[2]
MISTAKE = "mistake in the record: exit code "
_DEADLINE = 120.0
QUIET = ("-q", "-p", "no:cacheprovider")


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_the_record_is_up_to_date(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    broken = mutation.applied(text)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(text))
    for test in mutation.tests:
        path, *names = test.partition("[")[0].split("::")
        definitions = {getattr(node, "name", "") for node in ast.walk(ast.parse((ROOT / path).read_text()))}
        assert definitions.issuperset(names), f"{test} is not there"


@pytest.mark.exhaustive
def test_make_test_runs_the_named_tests() -> None:
    named = {test for mutation in MUTATIONS for test in mutation.tests}
    command = [sys.executable, "-m", "pytest", "--collect-only", *QUIET, *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    collected = done.stdout.splitlines()
    missing = [
        test
        for test in named
        if not any(line == test or line.startswith((f"{test}[", f"{test}::")) for line in collected)
    ]
    assert not missing, done.stdout + done.stderr


def test_names_tell_the_mutations_apart() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_all_of_make_test() -> None:
    arguments = arguments_of_make_test((ROOT / "Makefile").read_text())
    assert "tests" in arguments and not [word for word in arguments if "$" in word]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A program that doubles, and tests of it; one of them starts a process, which hangs if it does not double."""
    (tmp_path / "double.py").write_text("def double(x):\n    return 2 * x\n")
    tests = """
        import subprocess
        import sys
        from double import double

        def test_one(): assert double(1) == 2
        def test_zero(): assert double(0) == 0
        def test_wrong(): assert double(1) == 3
        def test_process():
            code = "import double, pathlib, time\\n" \\
                "if double.double(1) == 3: pathlib.Path(double.__file__).with_name('hangs').touch(); time.sleep(1000)"
            assert subprocess.Popen([sys.executable, "-c", code], cwd="/", start_new_session=True).wait() == 0
    """
    (tmp_path / "test_double.py").write_text(textwrap.dedent(tests))
    return Tree(tmp_path, limit=_DEADLINE)


def doubled(new: str = "3 * x", old: str = "2 * x") -> Mutation:
    return Mutation("factor", "triples", "double.py", old, new, ())


def check(tree: Tree, test: str, mutation: Mutation) -> Ended:
    return tree.check(mutation, f"test_double.py::{test}", *QUIET)


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (1, "FAILED test_a.py::test_b[1 - 2] - assert 1 == 2\n1 failed", FOUND),
        (1, "ERROR test_a.py::test_b - OSError: its fixture\n1 error", FOUND),
        (2, "FAILED test_a.py::test_b - no\n!!! stopping after 1 failures !!!", FOUND),
        (2, "ERROR test_a.py - SyntaxError: no\n!!! Interrupted: 1 error !!!", MISTAKE + "2 of pytest"),
        (0, "2 passed, 1 skipped", MISSED),
        (0, "1 skipped", MISTAKE + "0 of pytest"),
        (4, "ERROR: not found: test_a.py::test_c", MISTAKE + "4 of pytest"),
        (5, "1 deselected", MISTAKE + "5 of pytest"),
        (None, "FAILED test_a.py::test_b - no", f"{MISSED}: no end within the limit"),
    ],
)
def test_verdicts(code: int | None, output: str, verdict: str) -> None:
    assert Ended(code, output).verdict == verdict


@pytest.mark.exhaustive
def test_a_mutation_is_made_found_and_undone(tree: Tree, tmp_path: Path) -> None:
    ended = tree.check(doubled(), "test_double.py", "-k", "one or zero", "-n", "2", *QUIET)
    assert (ended.verdict, ended.failed) == (FOUND, "test_double.py::test_one")
    assert (tmp_path / "double.py").read_text() == "def double(x):\n    return 2 * x\n"


def test_tests_that_fail_anyway_prove_nothing(tree: Tree) -> None:
    with pytest.raises(ValueError, match="tests that fail without a mutation, or none"):
        check(tree, "test_wrong", doubled())


@pytest.mark.parametrize(("old", "count"), [("4 * x", 0), ("x", 2)])
def test_an_outdated_record_is_named(tree: Tree, old: str, count: int) -> None:
    with pytest.raises(ValueError, match=rf"double.py, which has the old text of mutation 'factor' {count} times"):
        check(tree, "test_one", doubled(old=old))


@pytest.mark.exhaustive
def test_nothing_is_left_of_tests_that_hang(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "double.py").write_text("def double(x):\n    return 3 * x\n")
    before = psutil.Process().children()
    ended = Tree(tmp_path, limit=3.0).run_pytest("test_double.py::test_process", *QUIET)
    assert ended.verdict == f"{MISSED}: no end within the limit"
    assert psutil.Process().children() == before


@pytest.mark.exhaustive
def test_nothing_is_left_after_an_interrupt(tree: Tree, tmp_path: Path) -> None:
    code = f"""
        import pathlib, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        from tests.unit.test_mutation_check import check, doubled
        from tools.mutation_check import Tree
        check(Tree(pathlib.Path({str(tmp_path)!r})), "test_process", doubled())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stderr=subprocess.PIPE)
    below: list[psutil.Process] = []
    try:
        until = time.monotonic() + _DEADLINE
        while not (tmp_path / "hangs").exists():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)
        below = psutil.Process(process.pid).children(recursive=True)
        assert len(below) == 2, "pytest, and what the test has started"
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=_DEADLINE)[1]
        assert not any(child.is_running() for child in below)
    finally:
        process.kill()
        for child in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
