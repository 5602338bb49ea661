"""The tables of docs/performance.md are those of the benchmarks' pages."""

from __future__ import annotations

import re

import pytest

from tests.unit.pages import ROOT, read
from tools.performance_tables import filled, table_below

PAGE = "docs/performance.md"


def test_tables_are_those_of_the_benchmarks():
    assert filled(read(PAGE), ROOT) == read(PAGE), "run: python tools/performance_tables.py docs/performance.md"


def test_every_table_with_figures_is_one_of_these():
    text = read(PAGE)
    marked = re.findall(r"^<!-- table: [\s\S]*?^<!-- /table -->$", text, re.MULTILINE)
    assert len(marked) == 6
    for table in marked:
        assert len(re.findall(r"^\|.*\d\.\d", table, re.MULTILINE)) >= 3
        text = text.replace(table, "")
    assert not re.search(r"^\|.*\d\.\d", text, re.MULTILINE)


def test_another_figure_is_renewed(tmp_path):
    (tmp_path / "page.md").write_text("## Speed\n\nof two\n\n| a |\n|---|\n| 1.0 |\n\n| b |\n")
    text = "x\n<!-- table: page.md, ## Speed -->\n\n| a |\n|---|\n| 2.0 |\n\n<!-- /table -->\ny\n"
    assert filled(text, tmp_path) == text.replace("2.0", "1.0")


def test_a_table_that_is_not_there():
    with pytest.raises(ValueError, match=r"Received: '## Size'. Expected: the beginning of a line above a table"):
        table_below("## Speed\n\n| a |\n", "## Size")


def test_the_readme_has_the_figures_of_one_run_of_the_benchmark():
    speed = read("README.md").partition("## Speed")[2].partition("\n## ")[0]
    figures = re.findall(r"(\d+\.\d) \((\d+) %\)", speed)
    measured = read("benchmarks/data_parallel/README.md")
    rows = re.findall(r"^\|[^|]+\|[^|]+\| (\d+\.\d+) \([^|]+\| (\d+)% \|", measured, re.MULTILINE)
    assert len(figures) == 5
    assert {*figures} <= {(f"{float(time):.1f}", efficiency) for time, efficiency in rows}
