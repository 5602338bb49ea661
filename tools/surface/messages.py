"""What tfdist says in words: errors, warnings, and lines on standard error."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent.parent / "tfdist"
# Functions whose argument is shown, beside what is raised.
_SAYING = ("warn", "message", "say", "_say", "lose", "warn_once")
_SHORTEST = 12


def messages() -> list[str]:
    """A line for each text with its file, in the order of the files; what is put in at run time is {}."""
    found = []
    for path in sorted(_ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            found += [f"{path.relative_to(_ROOT)}: {text}" for text in _said(node) if len(text) >= _SHORTEST]
    return found


def _said(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        call = node.exc
    elif isinstance(node, ast.Call) and _name(node.func) in _SAYING:
        call = node
    else:
        return
    for argument in call.args[:1]:
        yield _text(argument).replace("\n", " ")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _text(node: ast.expr) -> str:
    """A text as it stands in the source, whichever way it is put together."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"
