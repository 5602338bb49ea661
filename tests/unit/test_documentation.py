"""The documentation names what exists: features have tests, links lead somewhere, the navigation has all pages."""

from __future__ import annotations

import ast
import importlib
import inspect
import re

import pytest

from tests.unit.pages import PAGES, ROOT, anchors, blocks_of, prose, read, side

PUBLIC = (
    "tfdist",
    "tfdist.callbacks",
    "tfdist.cluster",
    "tfdist.layers",
    "tfdist.memory",
    "tfdist.optimizers",
    "tfdist.planning",
    "tfdist.testing",
)


def dangling(page: str, text: str) -> list[str]:
    """Links of a page that lead nowhere in this repository."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if not linked.exists() or (anchor and anchor not in anchors(str(linked.relative_to(ROOT)))):
            found.append(target)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert dangling(page, prose(page)) == []


def test_links_that_lead_nowhere_are_found():
    text = "[a](clusters.md) [b](clusters.md#nothing) [c](nothing.md) [d](#jobs) [e](#job) [f](https://keras.io)"
    assert dangling("docs/submit.md", text) == ["clusters.md#nothing", "nothing.md", "#job"]


def navigation() -> list[str]:
    """The pages that the navigation of the site names, in their order."""
    _, _, nav = read("mkdocs.yml").partition("\nnav:\n")
    return re.findall(r"^ +- [^:\n]+: (\S+\.md)$", nav, re.MULTILINE)


def test_the_navigation_has_every_page_once():
    assert sorted(navigation()) == PAGES


def entries() -> dict[str, str]:
    """Headings of the reference, and where the docstring below each is taken from."""
    text = "".join(read(page) for page in PAGES if page.startswith("docs/api/"))
    return dict(re.findall(r"^## (\S+)\n\n(?:.+\n)+\n::: (\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_has_every_public_name(name):
    module = importlib.import_module(name)
    documented = {heading.rpartition(".")[2] for heading in entries()}
    subpackages = {path.name for path in (ROOT / "tfdist").iterdir()}
    assert set(module.__all__) - subpackages - documented == set()


def test_the_reference_takes_docstrings_from_where_they_are():
    for heading, path in entries().items():
        package, _, name = heading.rpartition(".")
        found = getattr(importlib.import_module(package), name)
        if inspect.ismodule(found):
            defined = found.__name__
        elif isinstance(found, type) or inspect.isfunction(found):
            defined = f"{found.__module__}.{found.__qualname__}"
        else:
            # A value does not know where it comes from.
            defined = path if getattr(importlib.import_module(path.rpartition(".")[0]), name) is found else ""
        assert (heading, path) == (heading, defined)


@pytest.mark.parametrize("page", PAGES)
def test_python_compiles(page):
    for block in blocks_of(page, "python"):
        compile(block.text, block.place, "exec")
    for block in blocks_of(page, "diff"):
        for mark in "-+":
            compile(side(block.text, mark), block.place, "exec")


def test_the_hook_of_the_site_has_the_files_that_pages_link_to():
    """What tools/site_pages.py adds, of which only the patterns are read: MkDocs is not installed with the tests."""
    (patterns,) = re.findall(r"^_OUTSIDE = \((.*?)^\)", read("tools/site_pages.py"), re.MULTILINE | re.DOTALL)
    files = {path for pattern in (*ast.literal_eval(f"({patterns})"), "docs/**/*") for path in ROOT.glob(pattern)}
    assert {str(path.relative_to(ROOT)) for path in files} >= {*PAGES, "LICENSE"}
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s#]+)[^)]*\)", prose(page)):
            if "://" not in target:
                assert ((ROOT / page).parent / target).resolve() in files, f"{page} links to {target}"


def test_the_files_that_contributors_are_sent_to_exist():
    rows = re.findall(r"^\|.*\| (`tfdist/.+) \|$", read("CONTRIBUTING.md"), re.MULTILINE)
    assert len(rows) > 9
    for path in re.findall(r"`(tfdist/[^`]+)`", "".join(rows)):
        assert (ROOT / path).exists(), path
