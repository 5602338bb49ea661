"""Private names of Keras and TensorFlow are imported in one file, which says of each what would replace it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
UPSTREAM = ROOT / "tfdist/compat/upstream.py"
PRIVATE = ("keras.src", "tensorflow.python", "tensorflow.core", "tensorflow.compiler")


def imports(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Modules, and what is imported from them under which name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or "", [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)


def exported() -> set[str]:
    tree = ast.parse(UPSTREAM.read_text())
    [names] = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    return set(ast.literal_eval(names))


def test_no_other_file_imports_a_private_name():
    found = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in (ROOT / "tfdist").rglob("*.py")
        if path != UPSTREAM
        for module, _ in imports(path)
        if module.startswith(PRIVATE)
    }
    assert found == set()


def test_every_name_is_used():
    used = {
        name
        for path in (ROOT / "tfdist").rglob("*.py")
        for module, names in imports(path)
        if module == "tfdist.compat.upstream"
        for name in names
    }
    assert used == exported()


def test_the_table_has_every_name():
    table = ast.get_docstring(ast.parse(UPSTREAM.read_text()))
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)[1:]
    assert {name for row in rows for name in row.split(", ")} == exported()
