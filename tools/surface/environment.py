"""The environment variables that are tfdist's own."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tools.surface.sources import Sources, nodes_of, sources

_NAME = re.compile(r"TFDIST_[A-Z0-9_]*")


def environment() -> list[str]:
    """Those that the package reads or sets; a name that only stands in a message is marked."""
    return variables(sources("TFDIST_"))


def variables(trees: Sources) -> list[str]:
    """The variables that texts of some files name, other than their docstrings.

    Example:
        >>> variables({"a.py": ast.parse("os.environ['TFDIST_HOST']; fail('set TFDIST_PORTS')")})
        ['TFDIST_HOST', 'TFDIST_PORTS (in a longer text only)']
    """
    texts = [text for tree in trees.values() for text in _texts(tree)]
    named = {name for text in texts for name in _NAME.findall(text)}
    return [_shown(name) + ("" if name in texts else " (in a longer text only)") for name in sorted(named)]


def _shown(name: str) -> str:
    """Of names that are put together, and of all names, the beginning is what is known."""
    return f"{name}*" if name.endswith("_") else name


def _texts(tree: ast.Module) -> Iterator[str]:
    docstrings = {node.value for node in nodes_of(tree) if isinstance(node, ast.Expr)}
    for node in nodes_of(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value
