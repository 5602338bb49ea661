"""The feature table on two and three processes: equal to one process, and on all ranks alike."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

from tests.features import reference
from tests.features.running import Found, gaps_of, run_rows
from tests.features.selection import AGAIN, EXCHANGES
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

_DEADLINE = 540

# Steps are those of MultiWorkerMirroredStrategy, whose tests have one row of each kind; only the exchange is another.
# These are rows without sums of many terms in another order: what is left is the rounding of the sum over the ranks.
EXACT = ("numpy arrays", "Adam", "clipnorm", "gradient_accumulation_steps", "Embedding and Adam (sparse gradients)")
UNEVEN = "last batch of one row (81 rows)"
FEW = (*EXACT, UNEVEN)


def table(names: list[str], place: Path) -> Found:
    """Runs on every process."""
    import tfdist

    strategy = tfdist.HorovodStrategy(start_timeout=60, peer_timeout=300)
    assert strategy.extended._collectives is not None
    return run_rows(strategy, names, place, turn=strategy.num_replicas_in_sync % 2)


@functools.cache
def results(ranks: int, names: tuple[str, ...]) -> list[Found]:
    return run_local(table, workers=ranks, timeout=_DEADLINE, args=(list(names), reference.folder()))


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize(
    ("ranks", "names", "name"),
    [
        (2, FEW, UNEVEN),
        *(pytest.param(2, AGAIN, name, marks=pytest.mark.nightly) for name in AGAIN),
        *(pytest.param(3, EXCHANGES, name, marks=pytest.mark.nightly) for name in EXCHANGES),
    ],
)
def test_equals_one_process(ranks, names, name):
    for rank, found in enumerate(results(ranks, names)):
        gaps_of(found, name, rank)


@pytest.mark.timeout(_DEADLINE + 60)
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, FEW), pytest.param(3, EXCHANGES, marks=pytest.mark.nightly)], ids=[2, 3]
)
def test_weights_are_those_of_one_process_but_for_rounding(ranks, names, name):
    (gaps, *others) = [found[name] for found in results(ranks, names)]
    assert isinstance(gaps, dict), gaps
    assert max(gap for what, gap in gaps.items() if what.startswith(("weight", "predict"))) <= 5e-7
    # Every rank has compared its own: the same differences to the last bit.
    assert others == [gaps] * (ranks - 1)


def without_reduction() -> str:
    """Runs on every process, with a collective that returns what it is given."""
    from unittest import mock

    import tfdist
    from tests.features.table import BATCH, mlp, rows
    from tfdist.strategies.horovod.extended import Collectives
    from tfdist.testing import assert_transparent

    strategy = tfdist.HorovodStrategy(start_timeout=60, peer_timeout=300)

    def nothing(self: Collectives, op: Any, value: Any) -> Any:
        return value

    # The checksums at the end of the epoch would come before the comparison with one process.
    unchecked = mock.patch.dict(os.environ, {"TFDIST_CHECK_WEIGHTS": "0"})
    try:
        with unchecked, mock.patch.object(Collectives, "all_reduce", nothing):
            assert_transparent(strategy, mlp(), rows(), batch_size=BATCH)
    except AssertionError as error:
        return str(error)
    return "nothing was noticed"


def test_a_missing_reduction_is_noticed():
    for message in run_local(without_reduction, workers=2, timeout=120):
        assert message.startswith("HorovodStrategy with 2 replicas does not equal one process."), message
        assert "\n  weight 0" in message
