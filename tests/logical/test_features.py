"""Rows of the feature table on two logical devices: one of each kind, and all others in `make test-all`."""

from __future__ import annotations

import pytest

from tests.features import reference
from tests.features.selection import ON_TWO_DEVICES
from tests.features.table import FEATURES


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ON_TWO_DEVICES else pytest.mark.exhaustive) for name in FEATURES]
)
def test_equals_one_process(mirrored, name):
    with reference.remembered(name, reference.folder()):
        gaps = FEATURES[name](mirrored)
    assert gaps, "nothing was compared"
