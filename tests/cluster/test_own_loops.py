"""Custom training loops on two processes equal one, under both kinds of collectives."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from tests.tiers import daily
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

COMPILED = (True, False)


def each(kind: str) -> dict[Any, Any]:
    """In each process."""
    import tfdist
    from tests.own_loops import OPTIMIZERS, masks, train

    strategy = getattr(tfdist, kind)(start_timeout=60, peer_timeout=60)
    found: dict[Any, Any] = {(name, c): train(strategy, name, c) for name in OPTIMIZERS for c in COMPILED}
    return {**found, **{("masks", c): masks(strategy, c) for c in COMPILED}}


@functools.cache
def on_two(kind: str) -> list[dict[Any, Any]]:
    if kind == "HorovodStrategy":
        pytest.importorskip("horovod.tensorflow")
    return run_local(each, workers=2, timeout=240, args=(kind,))


def of_one(name: str) -> list[float]:
    import tensorflow as tf

    from tests.own_loops import train

    return train(tf.distribute.get_strategy(), name, compiled=True)


@pytest.mark.parametrize(
    "kind", daily(["MultiWorkerMirroredStrategy", "HorovodStrategy"], "MultiWorkerMirroredStrategy")
)
def test_equals_one_process(kind):
    from tests.own_loops import OPTIMIZERS

    for name in OPTIMIZERS:
        expected = of_one(name)
        for found in on_two(kind):
            for compiled in COMPILED:
                np.testing.assert_allclose(found[name, compiled], expected, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(
    "kind", daily(["MultiWorkerMirroredStrategy", "HorovodStrategy"], "MultiWorkerMirroredStrategy")
)
def test_processes_drop_other_rows(kind):
    for compiled in COMPILED:
        first, second = (found["masks", compiled] for found in on_two(kind))
        assert first != second
