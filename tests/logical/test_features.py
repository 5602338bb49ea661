"""Every row of the feature table, on two logical devices."""

from __future__ import annotations

import pytest

from tests.features import reference
from tests.features.table import FEATURES


@pytest.mark.parametrize("name", FEATURES)
def test_equals_one_process(mirrored, name):
    with reference.remembered(name, reference.folder()):
        gaps = FEATURES[name](mirrored)
    assert gaps, "nothing was compared"
