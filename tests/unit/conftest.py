"""What the tests of meetings share: a clock that they put forward, so that nobody has to be quick."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from tfdist.cluster import server, sockets


class Clock:
    """The clock of those who wait for each other."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Only a test that asks for it has this clock; its `ahead` is seconds."""
    made = Clock()
    for module in (server, sockets):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=made.monotonic, sleep=time.sleep))
    return made
