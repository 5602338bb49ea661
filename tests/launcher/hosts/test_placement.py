"""Which process runs on which host, and what it gets there."""

from __future__ import annotations

import json

import pytest

from tfdist.launcher.arguments import AUTO, Stages
from tfdist.launcher.hosts.places import ListedHost, described, place, plan_hosts, slots_of
from tfdist.launcher.plan import Machine, PlanError, RunOptions, shares

SMALL = Machine((0, 1), host="small")
LARGE = Machine(tuple(range(8)), ("0", "1", "2", "3"), "large")


@pytest.mark.parametrize(
    ("slots", "machine", "each", "expected"),
    [(None, SMALL, AUTO, 1), (None, LARGE, AUTO, 4), (None, LARGE, 2, 2), (None, LARGE, 0, 1), (6, LARGE, AUTO, 6)],
)
def test_how_many_places_a_host_has(slots, machine, each, expected) -> None:
    assert slots_of(ListedHost("a", slots), machine, each) == expected


def test_workers_fill_one_host_after_the_other() -> None:
    assert place(RunOptions(workers=3), {"a": 2, "b": 2, "c": 2}) == {
        "a": [("worker", 0), ("worker", 1)],
        "b": [("worker", 2)],
    }


def test_parameter_servers_are_dealt_out_and_take_no_place() -> None:
    places = place(RunOptions(workers=2, ps=3), {"a": 1, "b": 1})
    assert places == {"a": [("chief", 0), ("worker", 0), ("ps", 0), ("ps", 2)], "b": [("worker", 1), ("ps", 1)]}


def test_each_host_shares_out_its_own_cores_and_gpus() -> None:
    options = RunOptions(workers=6)
    places = place(options, {"small": 2, "large": 4})
    addresses = {"small": ["10.0.0.1:1", "10.0.0.1:2"], "large": [f"[fd00::2]:{port}" for port in (1, 2, 3, 4)]}
    of_run = (["python", "t.py"], {"A": "b"}, "run-1", "/logs")
    plans = plan_hosts(options, places, {"small": SMALL, "large": LARGE}, addresses, *of_run, restart=2)
    assert [(plan.name, plan.host, plan.cpus) for plan in plans] == [
        ("worker 0", "small", (0,)),
        ("worker 1", "small", (1,)),
        ("worker 2", "large", (0, 1)),
        ("worker 3", "large", (2, 3)),
        ("worker 4", "large", (4, 5)),
        ("worker 5", "large", (6, 7)),
    ]
    assert [plan.env.get("CUDA_VISIBLE_DEVICES") for plan in plans] == [None, None, "0", "1", "2", "3"]
    assert [plan.shown for plan in plans] == [True] + [False] * 5
    for index, plan in enumerate(plans):
        config = json.loads(plan.env["TF_CONFIG"])
        assert config["cluster"]["worker"] == addresses["small"] + addresses["large"]
        assert config["task"] == {"type": "worker", "index": index}
        assert (plan.env["A"], plan.env["TFDIST_RESTART"], plan.env["TFDIST_RUN_ID"]) == ("b", "2", "run-1")


def test_addresses_belong_to_the_host_of_each_process() -> None:
    """Processes of a job are not next to each other where there are several jobs."""
    options = RunOptions(workers=2, ps=2)
    places = place(options, {"a": 1, "b": 1})
    addresses = {"a": ["a:1", "a:2", "a:3"], "b": ["b:1", "b:2"]}
    machines = {name: Machine((0, 1), host=name) for name in places}
    plans = plan_hosts(options, places, machines, addresses, ["python"], {}, "r", "/l")
    cluster = json.loads(plans[0].env["TF_CONFIG"])["cluster"]
    assert cluster == {"chief": ["a:1"], "worker": ["a:2", "b:1"], "ps": ["a:3", "b:2"]}
    assert [(plan.name, plan.host) for plan in plans] == [
        ("chief 0", "a"),
        ("worker 0", "a"),
        ("worker 1", "b"),
        ("ps 0", "a"),
        ("ps 1", "b"),
    ]
    assert [plan.is_replaceable for plan in plans] == [False, True, True, False, False]


def test_stages_go_over_hosts() -> None:
    options = RunOptions(workers=4, stages=Stages(2, 2))
    places = place(options, {"a": 3, "b": 3})
    assert [len(tasks) for tasks in places.values()] == [3, 1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cpus_per_worker": 2}, "--cpus-per-worker 2: 2 processes need 4 cores, but 2 are usable"),
        ({"gpus_per_worker": 1}, "--gpus-per-worker 1: 2 processes need 2 GPUs, but 0 were found"),
    ],
)
def test_a_host_that_has_too_little_is_named(more: dict, words: str) -> None:
    options = RunOptions(workers=4, **more)
    places = place(options, {"large": 2, "small": 2})
    with pytest.raises(PlanError) as raised:
        shares(options, SMALL, places["small"])
    assert words in str(raised.value) and str(raised.value).endswith("(host small)")
    shares(options, LARGE, places["large"])


def test_where_what_runs() -> None:
    places = place(RunOptions(workers=8, ps=1), {"a": 3, "b": 2, "c": 3})
    assert described(places) == ("3 hosts (a: chief 0, worker 0 to 2, ps 0; b: worker 3 and 4; c: worker 5 to 7)")
    many = described(place(RunOptions(workers=20), {f"h{number}": 1 for number in range(20)}))
    assert many.startswith("20 hosts (h0: worker 0; ") and many.endswith("; h7: worker 7; and 12 more)")
    assert described({"a": [("worker", 0)]}) == "1 host (a: worker 0)"
