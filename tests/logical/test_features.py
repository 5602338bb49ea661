"""Rows of the feature table on two logical devices: one of each kind, and all others in `make test-all`."""

from __future__ import annotations

import pytest

from tests.features import reference
from tests.features.running import as_written
from tests.features.selection import EXCHANGES, ON_TWO_DEVICES
from tests.features.table import FEATURES
from tests.tiers import daily
from tfdist.strategies import global_batches


@pytest.mark.parametrize("name", daily(FEATURES, *ON_TWO_DEVICES))
def test_equals_one_process(mirrored, name):
    with reference.remembered(name, reference.folder()), as_written(name, turn=0):
        gaps = FEATURES[name](mirrored)
    assert gaps, "nothing was compared"


@pytest.mark.parametrize("name", daily(EXCHANGES, "last batch of one row (81 rows)"))
def test_data_that_are_sent_to_each_device_ahead_of_time(mirrored, name, monkeypatch):
    """As they are to GPUs."""
    monkeypatch.setattr(global_batches, "_are_cpus", lambda devices: False)
    test_equals_one_process(mirrored, name)
