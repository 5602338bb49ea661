"""Prints how many statements each package has, docstrings left out: `python tools/statements.py [FOLDER…]`."""

from __future__ import annotations

import ast
import collections
import sys
from pathlib import Path


def counts(folder: Path) -> dict[str, int]:
    """Statements by the first folder below one; "" has the files beside them."""
    found: collections.Counter[str] = collections.Counter()
    for path in sorted(folder.rglob("*.py")):
        nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.stmt)]
        texts = [node for node in nodes if isinstance(getattr(node, "value", None), ast.Constant)]
        docstrings = [node for node in texts if isinstance(node, ast.Expr) and isinstance(node.value.value, str)]
        found["".join(path.relative_to(folder).parts[:-1][:1])] += len(nodes) - len(docstrings)
    return dict(found)


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:] or ["tfdist", "tests", "tools", "benchmarks"]):
        found = counts(folder)
        for name, number in [*found.items(), ("in all", sum(found.values()))]:
            print(f"{number:7} {folder} {name}")
