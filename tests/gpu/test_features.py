"""The feature table on two logical GPUs: training equals that on one."""

from __future__ import annotations

import pytest

import tfdist
from tests.features.table import FEATURES


@pytest.fixture(scope="module")
def replicas(gpus: list[str]) -> tfdist.MirroredStrategy:
    return tfdist.MirroredStrategy(gpus)


@pytest.mark.parametrize("name", FEATURES)
def test_equals_one_process(replicas: tfdist.MirroredStrategy, name: str) -> None:
    assert FEATURES[name](replicas), "nothing was compared"
