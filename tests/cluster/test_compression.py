"""PowerSGD and TopK between processes: equal to the same written down by hand, and the same bits on all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.compressed_by_hand import assert_both, trained_both
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def train(options: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    """Runs on every process."""
    import tfdist

    options = {"kind": "MultiWorkerMirroredStrategy", **options}
    return trained_both(getattr(tfdist, options.pop("kind")), start_timeout=60, **options)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options", [{"transport": "direct", "bucket_bytes": 9000}, {"transport": "tensorflow"}, {"kind": "HorovodStrategy"}]
)
def test_equals_by_hand(options: dict[str, Any]) -> None:
    if "kind" in options:
        pytest.importorskip("horovod.tensorflow")
    assert_both(run_local(train, workers=2, timeout=180, args=(options,)))
