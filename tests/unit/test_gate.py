"""The gate and the nightly run: what fails runs once more, what was not run is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import nightly
from tools.nightly import Part, Row

ROOT = Path(__file__).parents[2]
# Each passes, fails or is skipped by what the folder says of its earlier runs.
TESTS = """
import pathlib, pytest

def runs(name):
    file = pathlib.Path(name)
    file.write_text(file.read_text() + "." if file.exists() else ".")
    return len(file.read_text())

def test_passes(): pass
@pytest.mark.skip
def test_is_not_there(): pass
"""
FAILS_ONCE = "def test_{0}(): assert runs('{0}') > 1\n"
FAILS_TWICE = "def test_{0}(): assert runs('{0}') > 2\n"
IS_SKIPPED_THEN = """
def test_{0}():
    if runs('{0}') > 1: pytest.skip("the second time")
    assert False
"""


def run(folder: Path, tests: str, *options: str) -> tuple[int, str, dict | None]:
    """Runs tests as `make test` does; returns the exit code, what was printed, and the result in the file."""
    (folder / "test_it.py").write_text(TESTS + tests)
    command = [sys.executable, str(ROOT / "tools/run_tests.py"), "it", *options, "-n", "1", "test_it.py"]
    # No other plugins: they take longer to load than all the rest.
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    file = folder / "build/reports/it.json"
    return done.returncode, done.stdout, json.loads(file.read_text()) if file.exists() else None


@pytest.mark.parametrize(
    ("tests", "options", "code", "failed", "unstable"),
    [
        pytest.param("", (), 0, [], [], id="all pass"),
        pytest.param(FAILS_TWICE.format("a"), ("--tries", "3"), 0, [], ["a"], id="best of three"),
        pytest.param(FAILS_ONCE.format("a") + FAILS_TWICE.format("b"), (), 1, ["b"], ["a"], id="one of each"),
        pytest.param(IS_SKIPPED_THEN.format("a"), (), 1, ["a"], [], id="skipped the second time"),
        pytest.param("".join(FAILS_ONCE.format(n) for n in "abcde"), (), 0, [], [*"abcde"], id="five"),
        pytest.param("".join(FAILS_ONCE.format(n) for n in "abcdef"), (), 1, [*"abcdef"], [], id="six are no noise"),
    ],
)
def test_what_fails_runs_once_more(tmp_path, tests, options, code, failed, unstable) -> None:
    ended, said, result = run(tmp_path, tests, *options)
    assert ended == code, said
    names = [f"test_it.py::test_{name}" for name in failed], [f"test_it.py::test_{name}" for name in unstable]
    assert (result["failed"], result["unstable"]) == names
    assert result["cases"] == 1 + len({*failed, *unstable})
    last = said.splitlines()[-len(unstable) :] if unstable else []
    assert last == [f"UNSTABLE {name}" for name in names[1]]


def test_what_cannot_be_imported_is_red(tmp_path) -> None:
    code, said, result = run(tmp_path, "import nothing_of_that_name\n")
    assert code == 2, said
    assert "Once more" in said and "UNSTABLE" not in said
    assert result["unstable"] == []


def test_parts_and_their_table(tmp_path, monkeypatch, capsys) -> None:
    """A red part does not stop the next one, and what was not run is named."""
    monkeypatch.chdir(tmp_path)
    parts = (
        Part("counts", "echo '38 of 39 found'; echo NOT FOUND; exit 1", cases=r"of (\d+) found", failed="NOT FOUND"),
        Part("hangs", "sleep 600"),
        Part("is_left_out", "touch ran"),
        Part("tests", """echo '{"cases": 3, "failed": [], "unstable": ["a::b"]}' > build/reports/it.json""", "it"),
    )
    monkeypatch.setattr(nightly, "PARTS", parts)
    monkeypatch.setattr(nightly, "_LIMIT", 1)
    assert nightly.main(["counts", "hangs", "tests"]) == 1
    text = (tmp_path / "build/reports/nightly.md").read_text()
    assert capsys.readouterr().out.endswith(text)
    rows = [[cell.strip() for cell in line.split("|")[1:6]] for line in text.splitlines()[2:6]]
    assert rows == [
        ["counts", "RED", "39", "1", "0"],
        ["hangs", "ended: it took too long", "", "0", "0"],
        ["is_left_out", "not run", "", "", ""],
        ["tests", "passed", "3", "0", "1"],
    ]
    assert text.splitlines()[-1] == "- UNSTABLE a::b"
    assert not (tmp_path / "ran").exists()
    assert nightly.main(["tests"]) == 0
    with pytest.raises(SystemExit):
        nightly.main(["test"])


def test_parts_of_one_core_run_beside_each_other(tmp_path, monkeypatch) -> None:
    """Two at a time, and none beside one that keeps both busy."""
    monkeypatch.chdir(tmp_path)
    meet = "touch {0}; for i in $(seq 600); do test -e {1} && exit; sleep 0.1; done; exit 1"
    parts = (
        Part("left", meet.format("left", "right"), cores=1),
        Part("right", meet.format("right", "left"), cores=1),
        Part("both", "sleep 0.5; test ! -e third"),
        Part("third", "touch third", cores=1),
    )
    monkeypatch.setattr(nightly, "PARTS", parts)
    assert nightly.main([]) == 0


def test_what_runs_ends_with_the_night(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    loop = "echo $$ > {0}; trap 'touch {0}-ended; exit' TERM; while true; do sleep 0.1; done"
    both = [Part(name, loop.format(name), cores=1) for name in ("left", "right")]
    interrupt = Part("-", f"until test -s left -a -s right; do sleep 0.1; done; kill -INT {os.getpid()}", cores=0)
    monkeypatch.setattr(nightly, "PARTS", (*both, interrupt))
    with pytest.raises(KeyboardInterrupt):
        nightly.main([])
    assert all((tmp_path / f"{name}-ended").exists() for name in ("left", "right"))


def test_a_part_that_left_no_report_has_none_of_an_earlier_night(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build/reports").mkdir(parents=True)
    (tmp_path / "build/reports/it.json").write_text('{"cases": 3, "failed": [], "unstable": []}')
    monkeypatch.setattr(nightly, "PARTS", (Part("tests", "exit 3", "it"),))
    assert nightly.main([]) == 1
    row = (tmp_path / "build/reports/nightly.md").read_text().splitlines()[2]
    assert row.startswith("| tests | RED |  |")


def test_how_often_a_pattern_is_found() -> None:
    assert nightly._last(r"^(?:worse|better): ", "worse: a\nbetter: b\n") == "2"
    assert nightly._last(r"(\d+) of", "3 of 4\n5 of 6") == "5"
    assert nightly._last("", "text") == nightly._last("a", "b") == ""
    assert nightly.table({"timing": Row(None, "", "0", [], 1.0)}).count("not run") == len(nightly.PARTS) - 1
