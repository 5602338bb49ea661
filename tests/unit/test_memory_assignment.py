"""`assign` finds what fits, for not much more time than trying everything does."""

from __future__ import annotations

import itertools
import random

import pytest

from tfdist.memory.budget import BlockCost, assign, peak
from tfdist.memory.policy import MemoryPolicy, bytes_of_budget


def blocks_of(kept: int, inputs: int, *flops: float) -> list[BlockCost]:
    return [BlockCost(str(number), kept, inputs, one) for number, one in enumerate(flops)]


def test_peak():
    blocks = blocks_of(10, 2, 1, 1, 1)
    assert peak(blocks, ()) == 30
    assert peak(blocks, {0, 1, 2}) == 16
    # The last block gains nothing by being run again: its backward pass comes first.
    assert peak(blocks, {0, 1}) == 14


def test_the_cheapest_blocks_are_run_again():
    blocks = blocks_of(10, 1, 3.0, 1.0, 2.0, 9.0)
    assert [assign(blocks, limit) for limit in (40, 32, 23, 9, -1)] == [set(), {1}, {1, 2}, None, None]


def test_nearly_as_trying_everything():
    found_flops, least_flops = [], []
    for seed in range(60):
        rng = random.Random(seed)
        blocks = [BlockCost("", rng.randint(20, 100), rng.randint(1, 20), rng.random()) for _ in range(6)]
        subsets = [set(some) for count in range(7) for some in itertools.combinations(range(6), count)]
        for share in (1.0, 0.8, 0.6, 0.5, 0.4):
            limit = share * peak(blocks, ())
            fitting = [sum(blocks[n].flops for n in some) for some in subsets if peak(blocks, some) <= limit]
            found = assign(blocks, limit)
            assert (found is None) == (not fitting)
            if found is not None:
                assert peak(blocks, found) <= limit
                found_flops.append(sum(blocks[n].flops for n in found))
                least_flops.append(min(fitting))
    assert sum(found_flops) <= 1.2 * sum(least_flops)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("8GB", 8e9), ("8 GiB", 2**33), ("500 MB", 5e8), ("1.5k", 1500), (7, 7), ("7B", 7), ("2TiB", 2**41)],
)
def test_budgets(text, expected):
    assert bytes_of_budget(text) == expected


@pytest.mark.parametrize("budget", ["much", "", "-1GB", 0, "0GB", True, "8 apples", None])
def test_what_is_no_budget(budget):
    with pytest.raises(ValueError, match=r"budget=.*Expected: "):
        MemoryPolicy("auto", budget=budget)


def test_a_budget_belongs_to_the_automatic_mode():
    with pytest.raises(
        ValueError, match=r"mode='swap' and budget='8GB'. Expected: MemoryPolicy\('auto', budget='8GB'\)"
    ):
        MemoryPolicy("swap", budget="8GB")
    with pytest.raises(ValueError, match=r"mode='auto'. Expected one of"):
        MemoryPolicy({"*": "auto"})
