"""docs/features.md says which rows run under which strategy and in which tier, as the tests have it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.pages import ROOT, read
from tools import feature_matrix
from tools.feature_matrix import ROWS, cases, cell, filled, tier

PAGE = "docs/features.md"
SAMPLE = """
import pytest

@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.exhaustive)])
def test_rows(name): ...

@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "number"), [("c", 1), ("a", 2)])
def test_rest(name, number): ...

class TestAll:
    pytestmark = [pytest.mark.exhaustive]
    @pytest.mark.parametrize("case", [1.5, 2.5], ids=str)
    def test_case(self, case): ...
"""


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """A file with tests."""
    (tmp_path / "test_sample_of_a_matrix.py").write_text(SAMPLE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "test_sample_of_a_matrix.py"
    sys.modules.pop("test_sample_of_a_matrix", None)
    cases.cache_clear()


def test_the_page_is_current():
    assert filled(read(PAGE)) == read(PAGE), "run: python tools/feature_matrix.py docs/features.md"


def test_the_table_has_all_rows_and_no_row_is_without_a_test():
    from tests.features.table import FEATURES

    table = read(PAGE).partition("<!-- features -->")[2].partition("<!-- /features -->")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n") if line.startswith("|")]
    assert lines[0] == ["Feature", *ROWS, "Stock"]
    assert [line[0] for line in lines[2:]] == list(FEATURES)
    for name, mirrored, workers, horovod, synchronous, asynchronous, stock in lines[2:]:
        assert {mirrored, workers, horovod} <= {"=", "(=)"}, name
        assert synchronous.strip("()") in ("=", "≠", "✗"), name
        assert asynchronous.strip("()") in ("=", "✗"), name
        assert stock in ("=", "≠", "✗"), name


def test_tiers_are_those_of_the_marks(sample):
    both = [f"{sample}::test_rows", f"{sample}::test_rest"]
    assert [tier(both, row) for row in "abcd"] == ["=", "(=)", "(=)", "\N{EN DASH}"]
    assert tier(both[1:], "a") == "(=)"
    assert tier([f"{sample}::TestAll::test_case[2.5]"], sign="✓") == "(✓)"
    assert tier([f"{sample}::test_rows[b]"], sign="✓") == "(✓)"


@pytest.mark.parametrize("name", ["test_nothing", "test_rows[c]", "TestAll::test_case[3.5]"])
def test_a_test_that_is_gone_is_an_error(sample, name):
    with pytest.raises(ValueError, match=r"Received: .*\. Expected: a (test|case) that exists"):
        tier([f"{sample}::{name}"])


@pytest.mark.exhaustive
def test_marks_are_read_as_pytest_reads_them():
    """The tier of each case of a file, by name, against what pytest collects."""
    place = "tests/logical/test_features.py::test_equals_one_process"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", place]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    collected = {line.partition("[")[2].removesuffix("]") for line in done.stdout.splitlines() if "::" in line}
    assert collected == {texts[0] for texts, daily in cases(place) if daily} != set()


def test_what_servers_refuse_or_do_otherwise_is_told():
    assert cell("servers, sync", "run_eagerly") == "✗"
    assert cell("servers, async", "run_eagerly") == "(✗)"
    assert cell("servers, sync", "BatchNormalization") == "≠"
    assert cell("servers, async", "BatchNormalization") == "(=)"


def test_every_topic_has_a_test_somewhere():
    for line in feature_matrix.topic_table().splitlines()[2:]:
        assert "✓" in line
