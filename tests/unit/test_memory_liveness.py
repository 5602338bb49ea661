"""`simulate` counts what a graph of operations needs, against cases that were counted by hand."""

from __future__ import annotations

import random

import pytest

from tfdist.memory import estimate
from tfdist.memory.estimate import Operation, as_made, newest_first


def simulate(operations, order=as_made):
    return estimate.simulate(operations, order(operations))


def held(operations, device="a") -> list[dict[str, int]]:
    """What is held after each operation, by label."""
    run = estimate.Run(operations)
    found = []
    for position in as_made(operations):
        run.step(operations[position])
        found.append(run.held(device))
    return found


def totals(operations, device="a") -> list[int]:
    return [sum(labels.values()) for labels in held(operations, device)]


def op(inputs, outputs, sizes, device="a", **more) -> Operation:
    return Operation(device, tuple(inputs), tuple(outputs), tuple(sizes), **more)


def test_a_chain_needs_what_goes_in_and_what_comes_out():
    chain = [op([], [0], [8]), op([0], [1], [4]), op([1], [2], [16])]
    assert simulate(chain)["a"].peak == 20
    assert totals(chain) == [8, 4, 0]


def test_what_is_kept_for_the_backward_pass_adds_up():
    layers = 5
    forward = [op([], [0], [10]), *(op([i], [i + 1], [10]) for i in range(layers))]
    backward = []
    gradient = layers
    for layer in reversed(range(layers)):  # each reads the gradient, and what its layer has read
        backward.append(op([gradient, layer], [100 + layer], [10]))
        gradient = 100 + layer
    assert simulate(forward)["a"].peak == 20
    assert simulate([*forward, *backward])["a"].peak == 10 * (layers + 2)


def test_several_outputs_and_readers():
    graph = [op([], [0, 1], [3, 5]), op([0], [2], [1]), op([0, 1], [3], [1]), op([2, 3], [4], [1])]
    # Nobody reads the last one, so that it is given back at once.
    assert totals(graph) == [8, 9, 2, 0]
    assert simulate(graph)["a"].peak == 10


def test_views_take_nothing_and_keep_what_they_show():
    graph = [op([], [0], [8]), op([0], [1], [8], is_view=True), op([], [2], [8]), op([1, 2], [3], [1])]
    assert totals(graph) == [8, 8, 16, 0]
    # Of something that is there anyhow: a variable.
    assert simulate([op([99], [1], [8], is_view=True)])["a"].peak == 0


def test_in_place():
    free = [op([], [0], [8]), op([0], [1], [8], is_in_place=True), op([1], [2], [1])]
    assert simulate(free)["a"].peak == 9
    shared = [op([], [0], [8]), op([0], [1], [8], is_in_place=True), op([0, 1], [2], [1])]
    assert simulate(shared)["a"].peak == 17
    smaller = [op([], [0], [8]), op([0], [1], [4], is_in_place=True)]
    assert simulate(smaller)["a"].peak == 12


def test_devices_and_copies():
    graph = [op([], [0], [8]), op([0], [1], [8], device="b"), op([0], [2], [2]), op([1], [3], [8])]
    found = simulate(graph)
    assert found["b"].peak == 16  # the copy, and what is made from it
    assert totals(graph) == [8, 16, 8, 0]  # the copy of what b has made comes at once
    assert totals(graph, "b")[-1] == 0


def test_the_order_heeds_what_waits():
    late = [op([], [0], [8], waits=(2,)), op([0], [1], [1]), op([], [2], [8]), op([2], [3], [1])]
    assert simulate(late)["a"].peak == 17
    gone = [op([], [0], [8], waits=(3,)), op([0], [1], [1]), op([], [2], [8]), op([2], [3], [1])]
    assert simulate(gone)["a"].peak == 9


def test_what_is_needed_inside():
    assert simulate([op([], [0], [8]), op([0], [1], [1], inside=100)])["a"].peak == 109


def test_what_there_is_at_the_peak():
    graph = [op([], [0], [8], label="x"), op([], [1], [2], label="y"), op([0, 1], [2], [1], label="z")]
    assert simulate(graph)["a"].at_peak == {"x": 8, "y": 2, "z": 1}


def test_newest_first_follows_a_gradient_with_its_update():
    large = 1 << 20
    # Two gradients, made one after the other; each is used up by an update that nothing else waits for.
    graph = [
        op([], [0], [large]),
        op([0], [1], [large]),
        op([0], [2], [large]),
        op([1], [3], [0], label="update"),
        op([2], [4], [0], label="update"),
    ]
    assert as_made(graph) == [0, 1, 2, 3, 4]
    assert newest_first(graph) == [0, 2, 4, 1, 3]
    assert simulate(graph)["a"].peak == 3 * large
    assert simulate(graph, newest_first)["a"].peak == 2 * large


def test_newest_first_does_little_things_at_once():
    graph = [op([], [0], [1 << 20]), op([], [1], [8]), op([1], [2], [8]), op([2, 0], [3], [8])]
    assert newest_first(graph)[:3] == [0, 1, 2]


@pytest.mark.parametrize("order", [as_made, newest_first])
def test_both_orders_heed_dependencies_and_leave_nothing_out(order):
    rng = random.Random(0)
    graph = [
        op(
            rng.sample(range(n), min(n, 2)),
            [n],
            [rng.choice([8, 1 << 20])],
            waits=tuple(rng.sample(range(n), min(n, 1))),
        )
        for n in range(60)
    ]
    found = order(graph)
    assert sorted(found) == list(range(60))
    place = {position: n for n, position in enumerate(found)}
    assert all(place[before] < place[n] for n in range(60) for before in (*graph[n].inputs, *graph[n].waits))


def test_a_place_that_is_taken_changes_its_label():
    graph = [op([], [0], [8], label="x"), op([0], [1], [8], is_in_place=True, label="y"), op([1], [2], [1], label="z")]
    assert held(graph)[:2] == [{"x": 8}, {"y": 8}]
