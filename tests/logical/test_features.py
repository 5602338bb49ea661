"""Rows of the feature table on two logical devices: one of each kind, and all others in `make nightly`."""

from __future__ import annotations

import pytest

from tests.features import reference
from tests.features.running import differences_of
from tests.features.selection import ON_TWO_DEVICES
from tests.features.table import FEATURES
from tests.tiers import daily
from tfdist.strategies.data_parallel import dataset

# What differs in how a batch is cut and handed out.
AHEAD = ("last batch of one row (81 rows)", "steps_per_execution, uneven", "Embedding and Adam (sparse gradients)")


@pytest.mark.parametrize("name", daily(FEATURES, *ON_TWO_DEVICES))
def test_equals_one_process(mirrored, name):
    assert differences_of(mirrored, name, reference.folder()), "nothing was compared"


@pytest.mark.nightly
@pytest.mark.parametrize("name", AHEAD)
def test_data_that_are_sent_to_each_device_ahead_of_time(mirrored, name, monkeypatch):
    """As they are to GPUs."""
    monkeypatch.setattr(dataset, "_are_cpus", lambda devices: False)
    test_equals_one_process(mirrored, name)
