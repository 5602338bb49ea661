"""Methods of compression over Horovod's sums."""

from __future__ import annotations

import numpy as np
import pytest

from tests.compressed_by_hand import assert_both, trained_both
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def train() -> dict[str, list[np.ndarray]]:
    """Runs on every process."""
    import tfdist

    return trained_both(tfdist.HorovodStrategy, start_timeout=60, peer_timeout=60)


@pytest.mark.exhaustive
def test_equals_by_hand() -> None:
    assert_both(run_local(train, workers=2, timeout=180))
