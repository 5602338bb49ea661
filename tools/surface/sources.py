"""The source of the package, parsed."""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[2] / "tfdist"

Sources = Mapping[str, ast.Module]


def sources(*words: str) -> Sources:
    """The files of the package that have one of these words, by their paths: parsing all takes seconds."""
    found = [path for path in sorted(_PACKAGE.rglob("*.py")) if any(word in path.read_text() for word in words)]
    return {str(path.relative_to(_PACKAGE.parent)): parsed(str(path)) for path in found}


@functools.cache
def parsed(path: str) -> ast.Module:
    """One file."""
    return ast.parse(Path(path).read_text(encoding="utf-8"))


@functools.cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All that is in it; walking takes as long as parsing."""
    return list(ast.walk(tree))


def last_word(node: ast.AST) -> str:
    """What stands last in it; empty for what is neither a name nor an attribute."""
    return getattr(node, "attr", getattr(node, "id", ""))
