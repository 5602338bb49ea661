"""Where a model is cut, and how a pipeline is described: plain numbers and text, no model."""

from __future__ import annotations

import itertools
import random
import time

import pytest

from tests.tiers import daily
from tfdist.layer_graph.partition import balance, shares
from tfdist.strategies.pipeline.schedule import make_schedule
from tfdist.strategies.pipeline.summary import StageSummary, summary


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
    for _ in range(3000):
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
    assert compared > 1500


def test_fractions_are_compared_exactly_enough():
    generator = random.Random(2)
    for _ in range(300):
        costs = [generator.random() * 1e12 for _ in range(8)]
        expected = best_quality(costs, 3, (), ())
        assert quality(costs, balance(costs, 3), ()) == pytest.approx(expected, rel=1e-9)


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


@pytest.mark.parametrize("heavy", daily([0, 1000, 1999], "1000"))
def test_two_thousand_calls_on_sixteen_devices(heavy):
    costs = [1.0] * 2000
    costs[heavy] = 1e5
    begin = time.process_time()
    cuts = balance(costs, 16, crossing=[0.5] * 2000)
    assert time.process_time() - begin < 6  # about 1.5 s where this was written
    assert len(cuts) == 15
    sorted_loads = sorted(loads(costs, cuts, [0.5] * 2000))
    assert sorted_loads[-1] <= 1e5 + 0.5
    # 1999 over 15 parts is 133; with the heavy call in the middle, 7 parts share 1000.
    assert sorted_loads[-2] <= 144


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([1, 1, 1], 4),
            r"Received: 3 layers, 4 stages\. Expected: at least as many layers as.*at most 3 stages.*fewer devices",
        ),
        (([1, 1, 1], 3, (), {1}), r"Received: 3 layers and 1 forbidden cuts, 3 stages.*at most 2 stages"),
        (([], 2), r"Received: 0 layers, 2 stages"),
        (([1, 1], 0), r"parts is 0, but must be a whole number of at least 1"),
        (([1, 1], True), r"parts is True, but must be"),
        (([1, -1], 2), r"costs\[1\] is -1, but must be a finite number of at least 0"),
        (([1, float("nan")], 2), r"costs\[1\] is nan"),
        (([1, 1], 2, [0, float("inf")]), r"crossing\[1\] is inf"),
        (([1, 1], 2, [0, 1, 2]), r"crossing has 3 values, but there are 2 costs: give one value per call"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        balance(*arguments)


def test_shares():
    assert shares([3, 1, 4], (2,)) == [0.5, 0.5]
    assert shares([0, 0], (1,)) == [0.5, 0.5]


def stages(n: int, devices: int) -> list[StageSummary]:
    return [
        StageSummary(
            f"GPU:{i % devices}",
            [f"block{i}_first", "middle", f"block{i}_last"],
            parameters=1_000_000 * (i + 1),
            parameter_bytes=4e6 * (i + 1),
            flops=1e9,
            sent_bytes=0 if i == n - 1 else 802_816,
        )
        for i in range(n)
    ]


def test_summary_of_two_stages_in_a_narrow_terminal():
    text = summary(stages(2, 2), make_schedule("1f1b", 2, 8), 4, 1.7, 1, width=80)
    assert text.splitlines() == [
        " Stage  Device  Layers                Calls  Parameters   Size  FLOPs  Sent/row",
        " " + "─" * 78,
        "     0  GPU:0   block0_first …            3   1,000,000   4 MB  50.0%    803 KB",
        "                block0_last",
        "     1  GPU:1   block1_first …            3   2,000,000   8 MB  50.0%         -",
        "                block1_last",
        "",
        "                                          6   3,000,000  12 MB",
        "",
        "Schedule: 1f1b, 8 micro-batches of 4 rows",
        "Bubble: 11.1% = (K - 1) / (M + K - 1), K = 2 devices, M = 8",
        "Predicted speed-up: 1.70 x one device (at most 2)",
        "Effective batch: 8 micro-batches x 4 rows = 32 rows per step",
    ]


def test_summary_of_interleaved_chunks_and_replicas():
    text = summary(stages(4, 2), make_schedule("interleaved", 2, 8, 2), 4, 3.0, 2, width=120)
    lines = text.splitlines()
    assert lines[2] == ("     0  GPU:0   block0_first … block0_last      3   1,000,000   4 MB  25.0%    803 KB")
    assert [line.split()[1] for line in lines[2:6]] == ["GPU:0", "GPU:1", "GPU:0", "GPU:1"]
    assert lines[-4:] == [
        "Schedule: interleaved, 8 micro-batches of 4 rows",
        "Bubble: 5.9% = (K - 1) / (V M + K - 1), K = 2 devices, M = 8, V = 2 chunks",
        "Predicted speed-up: 3.00 x one device (at most 4)",
        "Effective batch: 2 replicas x 8 micro-batches x 4 rows = 64 rows per step",
    ]


def test_summary_fits_its_width_with_long_names():
    long = StageSummary("/job:worker/replica:0/task:0/device:GPU:0", ["a/" * 60 + "b", "[c]"], 10**12, 4e12, 0, 1.5)
    text = summary([long], make_schedule("gpipe", 1, 1), 1, 1.0, 1, width=100)
    assert max(map(len, text.splitlines())) <= 100
    assert "[c]" in text and "1.5 B" in text and "4 TB" in text
