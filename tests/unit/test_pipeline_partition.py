"""Where a model is cut, and how a pipeline is described: plain numbers and text, no model."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tfdist.layer_graph.partition import balance


def loads(costs, cuts, crossing):
    """What each part costs, with what crosses the cut at its beginning."""
    bounds = [0, *cuts, len(costs)]
    return [
        sum(costs[begin:end]) + (crossing[begin] if crossing and begin else 0)
        for begin, end in itertools.pairwise(bounds)
    ]


def quality(costs, cuts, crossing):
    parts = loads(costs, cuts, crossing)
    return max(parts), sum(part * part for part in parts)


def best_quality(costs, parts, crossing, forbidden):
    """The quality of the best of all partitions whose parts all cost something; None if there is none."""
    allowed = [p for p in range(1, len(costs)) if p not in forbidden]
    partitions = (
        cuts for cuts in itertools.combinations(allowed, parts - 1) if all(loads(costs, cuts, ())) and any(costs)
    )
    return min((quality(costs, cuts, crossing) for cuts in partitions), default=None)


def test_as_good_as_the_best_of_all_partitions():
    generator = random.Random(1)
    compared = 0
    for _ in range(1000):
        n, parts = generator.randint(1, 9), generator.randint(1, 5)
        costs = [generator.choice([0, 0, 1, 2, 3, 5, 8]) for _ in range(n)]
        crossing = [generator.choice([0, 1, 2, 4]) for _ in range(n)] if generator.random() < 0.6 else []
        forbidden = [p for p in range(n) if generator.random() < 0.2] if generator.random() < 0.5 else []
        expected = best_quality(costs, parts, crossing, forbidden)
        if expected is None:
            continue
        cuts = balance(costs, parts, crossing, forbidden)
        case = (costs, parts, crossing, forbidden, cuts)
        assert quality(costs, cuts, crossing) == expected, case
        assert not set(cuts) & set(forbidden), case
        assert all(loads(costs, cuts, ())), case
        compared += 1
    assert compared > 500


@pytest.mark.parametrize(
    ("costs", "parts", "arguments", "cuts"),
    [
        ([1, 1, 1, 1], 1, {}, ()),
        ([1, 1, 1, 1], 2, {}, (2,)),
        ([5, 1, 1, 1, 1], 2, {}, (1,)),
        ([1, 1, 1, 1], 4, {}, (1, 2, 3)),
        # What is left over beside a heavy call is shared evenly.
        ([9, 1, 1, 1, 1], 3, {}, (1, 3)),
        # What costs nothing stays with what made its input, unless that sends more.
        ([2, 0, 0, 2], 2, {}, (3,)),
        ([2, 0, 0, 2], 2, {"crossing": [0, 3, 1, 3]}, (2,)),
        ([2, 0, 0, 2], 2, {"forbidden": {2, 3}}, (1,)),
        # Too few calls cost something to give every part one.
        ([0, 3, 0], 3, {}, (1, 2)),
        ([0, 0], 2, {}, (1,)),
    ],
)
def test_cuts(costs, parts, arguments, cuts):
    assert balance(costs, parts, **arguments) == cuts


@pytest.fixture
def thousand_calls():
    costs = [1.0] * 1000
    costs[500] = 1e5
    return costs


def test_a_thousand_calls_on_eight_devices(thousand_calls):
    cuts = balance(thousand_calls, 8, crossing=[0.5] * 1000)
    *_, second, first = sorted(loads(thousand_calls, cuts, [0.5] * 1000))
    # 999 over 7 parts is 143; with the heavy call in the middle, 3 parts share 500.
    assert len(cuts) == 7 and first <= 1e5 + 0.5 and second <= 168


@pytest.mark.timing
def test_a_thousand_calls_take_seconds(thousand_calls):
    begin = time.process_time()
    balance(thousand_calls, 8, crossing=[0.5] * 1000)
    assert time.process_time() - begin < 3  # about 0.4 s where this was written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([1, 1, 1], 4),
            r"Received: 3 layers, 4 stages\. Expected: at least as many layers as.*at most 3 stages.*fewer devices",
        ),
        (([1, 1, 1], 3, (), {1}), r"Received: 3 layers and 1 forbidden cuts, 3 stages.*at most 2 stages"),
        (([], 2), r"Received: 0 layers, 2 stages"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        balance(*arguments)
