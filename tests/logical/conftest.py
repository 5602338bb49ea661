"""These tests run in pytest's own process, on the two logical CPU devices that tests/conftest.py makes."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def mirrored():
    import tfdist

    strategy = tfdist.MirroredStrategy()
    assert strategy.num_replicas_in_sync == 2
    return strategy
