"""Each example is one file, says what it is for, and is in the list of them."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.examples.conftest import EXAMPLES

FILES = sorted(EXAMPLES.glob("*.py"))
# What `pip install` gets by these names; all else is of Python itself.
PACKAGES = {"keras", "keras_hub", "numpy", "sklearn", "tensorflow", "tensorflow_datasets", "tfdist"}


def imported(path: Path) -> set[str]:
    """The first parts of all names of modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." if node.level else str(node.module).split(".")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_needs_no_other_file(path: Path) -> None:
    assert imported(path) - PACKAGES - set(sys.stdlib_module_names) == set()


def test_a_helper_beside_an_example_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import keras\n\ndef load():\n    from helper.data import rows\n    import os.path\n"
    )
    assert imported(tmp_path / "one.py") - PACKAGES - set(sys.stdlib_module_names) == {"helper"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_example_says_how_to_start_it_and_is_listed(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert f"examples/{path.name}" in docstring.partition("Example:")[2]
    assert f"]({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_have_options_that_exist(path: Path) -> None:
    options = set(re.findall(r'"(--[a-z][a-z-]*)"', path.read_text(encoding="utf-8")))
    pages = [ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""]
    pages += [page.read_text(encoding="utf-8") for page in (EXAMPLES / "README.md", *EXAMPLES.parent.glob("docs/*.md"))]
    shown = 0
    for line in "\n".join(pages).splitlines():
        if match := re.search(rf"\b{re.escape(path.name)}( [^`|#]*)", line):
            used = set(re.findall(r"(?<= )--[a-z][a-z-]*", match[1]))
            assert used <= options, line
            shown += len(used)
    assert shown or path.name == "train_digits.py"
