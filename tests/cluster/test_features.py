"""The feature table on two processes: what depends on them, and in `make nightly` the others, and two devices each."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from tests.features import reference
from tests.features.running import Found, gaps_of, run_rows
from tests.features.selection import EXCHANGES, IN_PROCESSES, VARIANTS
from tests.features.table import FEATURES
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

# One start of TensorFlow for the whole table, and one deadline for all of its rows.
_DEADLINE = 1200


def rows_of_table(names: list[str], devices: int, transport: str, shares: list[float] | None, place: Path) -> Found:
    """Runs on every process."""
    import tfdist
    from tfdist.steps.reduce import DirectReduction

    times = {"start_timeout": 60, "peer_timeout": 300}
    strategy = tfdist.MultiWorkerMirroredStrategy(transport=transport, batch_shares=shares, **times)
    assert strategy.num_replicas_in_sync == 2 * devices
    assert isinstance(strategy.extended._cross_device_ops, DirectReduction) == (transport == "auto")
    return run_rows(strategy, names, place, turn=devices % 2)


@functools.cache
def results(
    devices: int, names: tuple[str, ...], transport: str = "auto", shares: tuple[float, ...] | None = None
) -> list[Found]:
    return run_local(
        rows_of_table,
        workers=2,
        devices_per_worker=devices,
        timeout=_DEADLINE,
        args=(list(names), devices, transport, shares and list(shares), reference.folder()),
    )


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_equals_one_process(name):
    assert_compared(name, 1, IN_PROCESSES)


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.nightly
@pytest.mark.parametrize("name", EXCHANGES)
def test_with_two_devices_each_equals_one_process(name):
    assert_compared(name, 2, EXCHANGES)


_OVER_TENSORFLOW = ("BatchNormalization", "clipnorm", "Embedding and Adam (sparse gradients)")


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.nightly
@pytest.mark.parametrize("name", _OVER_TENSORFLOW)
def test_over_collectives_of_tensorflow_equals_one_process(name):
    assert_compared(name, 1, _OVER_TENSORFLOW, "tensorflow")


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.nightly
@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.parametrize(("devices", "transport"), [(1, "auto"), (2, "auto"), (1, "tensorflow")])
def test_with_unequal_shares_equals_one_process(name, devices, transport):
    for rank, found in enumerate(results(devices, EXCHANGES, transport, (2, 1))):
        gaps_of(found, name, rank)


_REST = tuple(name for name in FEATURES if name not in (*IN_PROCESSES, *EXCHANGES, *VARIANTS))


@pytest.mark.nightly
@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize("name", _REST)
def test_the_rest_equals_one_process(name):
    assert_compared(name, 1, _REST)


def assert_compared(name: str, devices: int, names: tuple[str, ...], transport: str = "auto") -> None:
    for rank, found in enumerate(results(devices, names, transport)):
        gaps_of(found, name, rank)
