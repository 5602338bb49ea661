"""Bytes from rank 0 to all, in chunks, over each transport."""

from __future__ import annotations

import hashlib
from unittest import mock

import numpy as np
import pytest

from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

CHUNK = 1000
SIZES = (0, 1, 2, 2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 7 * CHUNK + 3)


def content(size: int) -> bytes:
    return np.random.RandomState(size).bytes(size)


def received(strategy_name: str) -> list[str]:
    """Runs on every process."""
    import tfdist
    from tfdist.steps import collectives

    strategy = getattr(tfdist, strategy_name)(start_timeout=60, peer_timeout=60)
    with mock.patch.object(collectives, "_CHUNK", CHUNK):
        return [
            hashlib.sha256(
                collectives.broadcast_bytes(strategy, strategy._peers, content(size) if strategy.is_chief else None)
            ).hexdigest()
            for size in SIZES
        ]


CASES = [
    pytest.param("MultiWorkerMirroredStrategy", 2, 2, id="two devices each"),
    pytest.param("MultiWorkerMirroredStrategy", 3, 1, id="three processes"),
    pytest.param("HorovodStrategy", 2, 1, id="Horovod"),
]


@pytest.mark.parametrize(("strategy", "workers", "devices"), daily(CASES, "two devices each"))
def test_every_process_has_them(strategy: str, workers: int, devices: int) -> None:
    found = run_local(received, workers, devices_per_worker=devices, timeout=100, args=(strategy,))
    assert found == [[hashlib.sha256(content(size)).hexdigest() for size in SIZES]] * workers
