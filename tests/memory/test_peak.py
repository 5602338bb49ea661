"""What a training step needs at its peak, as TensorFlow's allocator counts it, in processes of their own."""

from __future__ import annotations

import pytest

from tests.memory.programs import printed_by

# Peaks depend on the order in which TensorFlow computes.
pytestmark = [pytest.mark.slow, pytest.mark.timing, pytest.mark.timeout(1220)]


def test_recomputation_hardly_grows_with_depth():
    few, many = (printed_by("peak_program", count, "none", "recompute", deadline=600) for count in ("4", "16"))
    assert many["recompute"] <= 0.25 * many["none"]
    # The inputs of twelve more blocks are 6 MB, all that is made inside of them 109 MB.
    assert many["none"] - few["none"] > 80e6
    assert many["recompute"] - few["recompute"] <= 0.2 * (many["none"] - few["none"])
