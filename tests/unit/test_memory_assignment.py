"""`assign` finds the least time that fits, as trying everything does."""

from __future__ import annotations

import itertools
import random

import pytest

from tfdist.memory.estimation.block_options import Option, assign, peak
from tfdist.memory.policy import MemoryPolicy, bytes_of_budget


def by_trying_all(blocks, limit):
    fitting = [chosen for chosen in itertools.product(*blocks) if peak(chosen) <= limit]
    return min((sum(option.seconds for option in chosen) for chosen in fitting), default=None)


def test_peak():
    keep, again = Option("none", 10, 10, 0.0), Option("recompute", 2, 12, 1.0)
    assert peak([keep] * 3) == 30
    assert peak([again] * 3) == 16
    # The last block gains nothing by being run again: its backward pass comes first.
    assert peak([again, again, keep]) == 14


def test_the_cheapest_blocks_are_run_again():
    blocks = [[Option("none", 10, 10, 0.0), Option("recompute", 1, 11, seconds)] for seconds in (3.0, 1.0, 2.0, 9.0)]
    assert [option.mode for option in assign(blocks, 40)] == ["none"] * 4
    assert [option.mode for option in assign(blocks, 32)] == ["none", "recompute", "none", "none"]
    assert [option.mode for option in assign(blocks, 23)] == ["none", "recompute", "recompute", "none"]
    assert assign(blocks, 9) is None
    assert assign(blocks, -1) is None


@pytest.mark.parametrize("seed", range(20))
def test_as_trying_everything(seed):
    rng = random.Random(seed)
    blocks = []
    for _ in range(6):
        kept, inputs = rng.randint(20, 100), rng.randint(1, 20)
        blocks.append(
            [
                Option("none", kept, kept, 0.0),
                Option("recompute", inputs, inputs + kept, rng.random()),
                Option("swap", 0, 2 * kept, 2 * rng.random()),
            ]
        )
    most = peak([options[0] for options in blocks])
    for share in (1.0, 0.8, 0.6, 0.5, 0.4, 0.2):
        # What is kept is rounded up, so that the limit is sure to be kept: no more than a part of it for each block.
        best, tight = by_trying_all(blocks, share * most), by_trying_all(blocks, share * most * (1 - 6 / 1024))
        found = assign(blocks, share * most)
        if found is None:
            assert tight is None
            continue
        assert peak(found) <= share * most
        assert best - 1e-9 <= sum(option.seconds for option in found)
        assert tight is None or sum(option.seconds for option in found) <= tight + 1e-9


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
