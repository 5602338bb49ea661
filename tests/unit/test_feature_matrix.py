"""docs/features.md says which rows run under which strategy and in which tier, as the tests have it."""

from __future__ import annotations

import re

from tests.unit.pages import read
from tools.feature_matrix import ROWS, cell, filled

PAGE = "docs/features.md"


def test_the_page_is_current():
    assert filled(read(PAGE)) == read(PAGE), "run: python tools/feature_matrix.py docs/features.md"


def test_the_table_has_all_rows_and_no_row_is_without_a_test():
    from tests.features.selection import VARIANTS
    from tests.features.table import FEATURES
    from tests.logical.test_fully_sharded import REFUSED as REFUSED_IF_SHARDED

    table = read(PAGE).partition("<!-- features -->")[2].partition("<!-- /features -->")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.split("\n") if line.startswith("|")]
    assert lines[0] == ["Feature", *ROWS, "Stock"]
    assert [line[0] for line in lines[2:]] == list(FEATURES)
    for name, mirrored, workers, sharded, horovod, synchronous, asynchronous, stock in lines[2:]:
        assert mirrored.strip("()") == "=", name
        assert workers.strip("()") == ("\N{EN DASH}" if name in VARIANTS else "="), name
        assert sharded.strip("()") == ("\N{EN DASH}" if name in (*REFUSED_IF_SHARDED, *VARIANTS) else "="), name
        assert horovod.strip("()") in ("=", "\N{EN DASH}"), name
        assert (synchronous == "\N{EN DASH}") == (name in VARIANTS), name
        assert asynchronous.strip("()") in ("=", "✗", "\N{EN DASH}"), name
        assert stock in ("=", "≠", "✗"), name


def test_what_servers_refuse_or_do_otherwise_is_told():
    assert cell("servers, sync", "run_eagerly") == "✗"
    assert cell("servers, async", "run_eagerly") == "(✗)"
    assert cell("servers, sync", "BatchNormalization") == "≠"
    assert cell("servers, async", "BatchNormalization") == "(=)"


def test_the_readme_counts_the_rows_in_which_stock_fails_and_differs():
    table = read(PAGE).partition("<!-- features -->")[2].partition("<!-- /features -->")[0]
    stock = re.findall(r"([=≠✗]) \|$", table, re.MULTILINE)
    counts = f"in {stock.count('✗')} of [{len(stock)} ways to train](docs/features.md)"
    readme = " ".join(read("README.md").split())
    assert counts in readme and f"silently gives wrong results in {stock.count('≠')} others" in readme
