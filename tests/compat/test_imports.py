"""Packages that are changed when a program imports them: it may look for them before, or not have them yet."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from tfdist.compat.patch import after_import


def test_a_program_looks_for_a_package_before_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.syspath_prepend(tmp_path)
    changes: list[int] = []
    after_import("added_later", lambda: changes.append(sys.modules["added_later"].number))
    assert importlib.util.find_spec("added_later") is None
    (tmp_path / "added_later.py").write_text("number = 3")
    importlib.invalidate_caches()
    assert importlib.util.find_spec("added_later") is not None
    assert changes == []
    import added_later

    assert importlib.util.find_spec("added_later") is not None
    assert (changes, added_later.number) == ([3], 3)
    after_import("added_later", lambda: changes.append(4))
    assert changes == [3, 4]
    del sys.modules["added_later"]
