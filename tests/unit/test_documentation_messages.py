"""Every message that docs/troubleshooting.md quotes occurs in the source, so that the page cannot rot."""

from __future__ import annotations

import ast
import functools
import importlib.util
import mmap
import re
from pathlib import Path

import pytest

from tests.unit.pages import ROOT, prose

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


def occurs(quote: str) -> bool:
    return any(quote in text for text in texts())


@pytest.mark.parametrize("quote", quotes(OURS))
def test_messages_of_tfdist(quote):
    assert occurs(quote)


def test_there_are_messages_and_others_are_not_found():
    assert len(quotes(OURS)) > 40
    assert not occurs("not all tasks came within start_timeout=… s; absent: …")


def _files() -> list[Path]:
    """Where the messages of TensorFlow and Keras are: in Python, and in a library."""
    folders = {name: Path(importlib.util.find_spec(name).origin).parent for name in ("tensorflow", "keras")}
    library = [path for path in folders["tensorflow"].glob("libtensorflow_framework.so*") if path.is_file()]
    keras = [folders["keras"] / "src" / name for name in ("trainers", "saving")]
    distribute = folders["tensorflow"] / "python" / "distribute" / "cross_device_ops.py"
    return [*(path for folder in keras for path in folder.rglob("*.py")), distribute, *library]


def test_messages_of_tensorflow_and_keras():
    missing = set(quotes(UPSTREAM))
    assert len(missing) > 5
    for path in _files():
        if path.stat().st_size:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                missing -= {quote for quote in missing if content.find(quote.encode()) >= 0}
    assert missing == set()
