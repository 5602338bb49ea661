"""What the tests of clusters share."""

from __future__ import annotations

import pytest


@pytest.fixture(params=[0, 1], ids=["chief", "other"])
def rank(request: pytest.FixtureRequest) -> int:
    """Each of two processes."""
    return request.param
