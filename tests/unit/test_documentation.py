"""The documentation names what exists: features have tests, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/**/*.md")]


def test_feature_table_lists_the_tested_features():
    from tests.features.table import FEATURES

    lines = (ROOT / "docs/features.md").read_text().splitlines()
    documented = [line.split("|")[1].strip() for line in lines if line.startswith("|")][2:]
    assert documented == list(FEATURES)


def test_feature_table_is_complete():
    cells = [line.split("|")[2:5] for line in (ROOT / "docs/features.md").read_text().splitlines() if "|" in line][2:]
    for mirrored, workers, stock in cells:
        assert (mirrored.strip(), workers.strip()) == ("=", "=")
        assert stock.strip() in ("=", "≠", "✗")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path) if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert f'id="{anchor}"' in linked.read_text() or anchor in _headings(linked), f"{target}: no such heading"


def _headings(page: Path) -> list[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles]
