"""The documentation names what exists: public names, messages, links that lead somewhere, every page."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import mmap
import re
from pathlib import Path

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


def test_the_reference_has_every_public_name():
    documented = {heading.rpartition(".")[2] for heading in entries()}
    subpackages = {path.stem for path in (ROOT / "tfdist").iterdir()}
    for name in PUBLIC:
        assert set(importlib.import_module(name).__all__) - subpackages - documented == set()


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
    for path in re.findall(r"`([\w/]+(?:\.py|/))`", read("docs/architecture.md").replace("`tfdist/`", "")):
        assert (ROOT / path).exists() or list((ROOT / "tfdist").rglob(path)), path


OURS, UPSTREAM = prose("docs/troubleshooting.md").split("\n## From TensorFlow and Keras\n")
# What is put into a message: an f-string's values, and those of logging and format.
_PLACE = re.compile(r"%[sdr]|%\.\df")


def quotes(text: str) -> list[str]:
    return re.findall(r"^> `(.+)`$", text, re.MULTILINE)


@functools.cache
def texts() -> list[str]:
    """All texts in the source of tfdist, with an ellipsis for what is put into them."""
    found = []
    for path in (ROOT / "tfdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(_PLACE.sub("…", node.value))
    return found


@pytest.mark.parametrize("quote", quotes(OURS))
def test_messages_of_tfdist(quote):
    assert any(quote in text for text in texts())


def test_there_are_messages_and_others_are_not_found():
    assert len(quotes(OURS)) > 30
    assert not any("not all tasks came within start_timeout=… s; absent: …" in text for text in texts())


def _files() -> list[Path]:
    """Where the messages of TensorFlow and Keras are: in Python, and in a library."""
    folders = {name: Path(importlib.util.find_spec(name).origin).parent for name in ("tensorflow", "keras")}
    library = [path for path in folders["tensorflow"].glob("libtensorflow_framework.so*") if path.is_file()]
    keras = [folders["keras"] / "src" / name for name in ("trainers", "saving")]
    distribute = [
        folders["tensorflow"] / "python" / "distribute" / name for name in ("cross_device_ops.py", "values.py")
    ]
    return [*(path for folder in keras for path in folder.rglob("*.py")), *distribute, *library]


def test_messages_of_tensorflow_and_keras():
    missing = set(quotes(UPSTREAM))
    assert len(missing) > 5
    for path in _files():
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                missing -= {quote for quote in missing if content.find(quote.encode()) >= 0}
    assert missing == set()
