"""Functions under `tfdist.launch`: in the test process, which is quick, and in scripts and kernels of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the test works in, and below which logs go."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
