"""What tfdist says in words: errors, warnings, and lines on standard error."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tools.surface.sources import last_word, nodes_of, sources

# Functions whose argument is shown, beside what is raised.
_SAYING = ("warn", "message", "say", "_say", "lose", "warn_once")
_SHORTEST = 12


def messages() -> list[str]:
    """A line for each text with its file, in the order of the files; what is put in at run time is {}."""
    found = []
    for path, tree in sources("").items():
        for node in nodes_of(tree):
            found += [f"{path.removeprefix('tfdist/')}: {text}" for text in _said(node) if len(text) >= _SHORTEST]
    return found


def _said(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        call = node.exc
    elif isinstance(node, ast.Call) and last_word(node.func) in _SAYING:
        call = node
    else:
        return
    for argument in call.args[:1]:
        yield _text(argument).replace("\n", " ")


def _text(node: ast.expr) -> str:
    """A text as it stands in the source, whichever way it is put together."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"
