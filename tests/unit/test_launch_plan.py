from __future__ import annotations

import json

import pytest

from tfdist.cluster.sockets import join_address
from tfdist.launcher.plan import (
    Machine,
    PlanError,
    ProcessPlan,
    RunOptions,
    default_workers,
    jobs_of,
    plan_run,
    shares,
)
from tfdist.launcher.supervisor import announcement

TWO_CORES = Machine((0, 1))


def make(options: RunOptions, machine: Machine = TWO_CORES, environ=None, **more) -> list[ProcessPlan]:
    jobs = jobs_of(options, [join_address(options.host, 20001 + at) for at in range(len(options.tasks))])
    return plan_run(options, ["python", "t.py"], machine, jobs, environ or {}, "run-1", "/logs", **more)


def test_two_workers_know_the_cluster_and_themselves() -> None:
    plans = make(RunOptions(workers=2))
    cluster = {"worker": ["127.0.0.1:20001", "127.0.0.1:20002"]}
    for index, plan in enumerate(plans):
        assert json.loads(plan.env["TF_CONFIG"]) == {"cluster": cluster, "task": {"type": "worker", "index": index}}
        assert plan.env["TFDIST_CLUSTER"] == plan.env["TF_CONFIG"]
        assert plan.env["TFDIST_RUN_ID"] == "run-1"
        assert plan.env["TFDIST_LOG_DIR"] == "/logs"
        assert plan.env["PYTHONUNBUFFERED"] == "1"
        assert plan.command == ("python", "t.py")
    assert [plan.shown for plan in plans] == [True, False]
    assert [plan.log_name for plan in plans] == ["worker-0.log", "worker-1.log"]


@pytest.mark.parametrize(
    ("gpus", "gpus_per_worker", "expected"),
    [(0, "auto", 2), (1, "auto", 1), (4, "auto", 4), (4, 2, 2), (5, 2, 2), (4, 0, 2), (1, 2, 2)],
)
def test_as_many_workers_as_there_are_gpus_for(gpus: int, gpus_per_worker: int | str, expected: int) -> None:
    machine = Machine((0, 1), tuple(map(str, range(gpus))))
    assert default_workers(machine, gpus_per_worker) == expected


def test_chief_takes_the_place_of_the_first_worker() -> None:
    plans = make(RunOptions(workers=3, chief=True))
    assert [plan.name for plan in plans] == ["chief 0", "worker 0", "worker 1"]
    assert json.loads(plans[1].env["TF_CONFIG"]) == {
        "cluster": {"chief": ["127.0.0.1:20001"], "worker": ["127.0.0.1:20002", "127.0.0.1:20003"]},
        "task": {"type": "worker", "index": 0},
    }
    assert [plan.shown for plan in plans] == [True, False, False]


def test_parameter_servers_and_workers_serve_a_chief() -> None:
    plans = make(RunOptions(workers=2, ps=1))
    assert [(plan.name, plan.shown, plan.serves, plan.is_replaceable) for plan in plans] == [
        ("chief 0", True, False, False),
        ("worker 0", False, True, True),
        ("worker 1", False, True, True),
        ("ps 0", False, True, False),
    ]
    assert json.loads(plans[3].env["TF_CONFIG"]) == {
        "cluster": {
            "chief": ["127.0.0.1:20001"],
            "worker": ["127.0.0.1:20002", "127.0.0.1:20003"],
            "ps": ["127.0.0.1:20004"],
        },
        "task": {"type": "ps", "index": 0},
    }
    assert not any(plan.serves or plan.is_replaceable for plan in make(RunOptions(workers=2, chief=True)))


def test_the_cores_and_gpus_are_for_the_workers_that_parameter_servers_have() -> None:
    plans = make(RunOptions(workers=2, ps=1), Machine((0, 1, 2, 3, 4), ("0", "1", "2")))
    assert [(plan.name, plan.cpus, plan.env["CUDA_VISIBLE_DEVICES"]) for plan in plans] == [
        ("chief 0", (), ""),
        ("worker 0", (0, 1), "0"),
        ("worker 1", (2, 3), "1"),
        ("ps 0", (), ""),
    ]
    assert [plan.env.get("OMP_NUM_THREADS") for plan in plans] == [None, "2", "2", None]
    assert [plan.env["TF_NUM_INTEROP_THREADS"] for plan in plans] == ["5", "4", "4", "5"]
    shared = make(RunOptions(workers=3, ps=1), Machine((0, 1), ("0", "1")))
    assert [(plan.cpus, plan.env["CUDA_VISIBLE_DEVICES"]) for plan in shared] == [
        *(((), visible) for visible in ("", "0", "1", "0", ""))
    ]
    assert {plan.env["TF_FORCE_GPU_ALLOW_GROWTH"] for plan in shared} == {"true"}
    assert "TF_FORCE_GPU_ALLOW_GROWTH" not in make(RunOptions(2, ps=1), Machine((0, 1), ("0", "1")))[0].env


def test_defaults_of_a_pinned_worker() -> None:
    plan = make(RunOptions(workers=2), Machine(tuple(range(6))))[0]
    assert plan.env["TF_NUM_INTRAOP_THREADS"] == plan.env["OMP_NUM_THREADS"] == "3"
    assert plan.env["TF_NUM_INTEROP_THREADS"] == "3"
    assert plan.env["TF_CPP_MIN_LOG_LEVEL"] == "2"
    assert plan.env["MALLOC_TOP_PAD_"] == "67108864"


@pytest.mark.parametrize(("ps", "cores", "expected"), [(0, 2, "2"), (0, 16, "8"), (1, 2, "4"), (1, 16, "8")])
def test_interop_threads(ps: int, cores: int, expected: str) -> None:
    plans = make(RunOptions(workers=2, ps=ps), Machine(tuple(range(cores))))
    (plan,) = (plan for plan in plans if plan.name == "worker 0")
    assert plan.env["TF_NUM_INTEROP_THREADS"] == expected


def test_users_environment_beats_the_defaults_and_env_option_beats_both() -> None:
    environ = {"OMP_NUM_THREADS": "7", "TF_CPP_MIN_LOG_LEVEL": "0", "MALLOC_TOP_PAD_": "1", "MINE": "a", "OTHER": "b"}
    plan = make(RunOptions(env={"MINE": "c", "TF_CPP_MIN_LOG_LEVEL": "1"}), environ=environ)[0]
    assert plan.env["OMP_NUM_THREADS"] == "7"
    assert plan.env["TF_CPP_MIN_LOG_LEVEL"] == "1"
    assert plan.env["MALLOC_TOP_PAD_"] == "1"
    assert plan.env["MINE"] == "c"
    assert plan.env["OTHER"] == "b"


def test_inherited_cluster_is_replaced() -> None:
    plan = make(RunOptions(), environ={"TF_CONFIG": "{}", "TFDIST_CLUSTER": "{}"})[1]
    assert json.loads(plan.env["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert plan.env["TFDIST_CLUSTER"] == plan.env["TF_CONFIG"]


@pytest.mark.parametrize(
    ("workers", "cpus", "cores", "expected"),
    [
        (2, "auto", (0, 1), [(0,), (1,)]),
        (2, "auto", (0, 1, 2, 3, 4), [(0, 1), (2, 3)]),
        (2, "auto", (4, 6), [(4,), (6,)]),
        (8, "auto", (0, 1), []),
        (1, "auto", (0, 1), []),
        (2, 1, (0, 1, 2, 3), [(0,), (1,)]),
        (1, 2, (0, 1, 2, 3), [(0, 1)]),
    ],
)
def test_share_cpus(workers: int, cpus: int | str, cores: tuple[int, ...], expected: list[tuple[int, ...]]) -> None:
    for ps in (0, 1):
        found, _ = shares(RunOptions(workers=workers, ps=ps, cpus_per_worker=cpus), Machine(cores))
        assert found == {("worker", rank): share for rank, share in enumerate(expected)}


def test_too_few_cores() -> None:
    with pytest.raises(PlanError, match=r"--cpus-per-worker 2: 2 processes need 4 cores, but 2 are usable here.*auto"):
        make(RunOptions(workers=2, cpus_per_worker=2))


@pytest.mark.parametrize(
    ("options", "gpus", "expected"),
    [
        (RunOptions(2), (), {}),
        (RunOptions(2), ("0", "1"), {("worker", 0): ("0",), ("worker", 1): ("1",)}),
        (RunOptions(2), ("0", "1", "2", "3"), {("worker", 0): ("0", "1"), ("worker", 1): ("2", "3")}),
        (RunOptions(2, gpus_per_worker=1), ("4", "5", "6"), {("worker", 0): ("4",), ("worker", 1): ("5",)}),
        (RunOptions(2, gpus_per_worker=0), ("0",), {("worker", 0): (), ("worker", 1): ()}),
        (RunOptions(3), ("0", "1"), {("worker", 0): ("0",), ("worker", 1): ("1",), ("worker", 2): ("0",)}),
        (
            RunOptions(1, ps=1, gpus_per_worker=1),
            ("0", "1"),
            {("chief", 0): (), ("worker", 0): ("0",), ("ps", 0): ()},
        ),
    ],
)
def test_share_gpus(options: RunOptions, gpus: tuple[str, ...], expected: dict) -> None:
    _, found = shares(options, Machine((0,), gpus))
    assert found == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "--workers 0: expected at least 1. Use -n 1"),
        ({"ps": -1}, "--ps -1: expected 0 or more. Leave --ps out"),
        (
            {"ps": 1, "chief": True},
            "--chief and --ps 1: expected only one of them. With parameter servers a chief is started anyway, "
            "which drives the workers: leave --chief out.",
        ),
        ({"env": {"TFDIST_REPLACEMENT": "1"}}, "tfdist run sets TFDIST_REPLACEMENT for every process itself."),
        ({"env": {"TF_CONFIG": "{}"}}, "--env TF_CONFIG=...: tfdist run sets TF_CONFIG for every process itself"),
        ({"env": {"TFDIST_LOG_DIR": "x"}}, "Use --log-dir."),
        ({"env": {"TFDIST_RESTART": "1"}}, "tfdist run sets TFDIST_RESTART for every process itself. Leave it out."),
        ({"env": {"TFDIST_PROGRESS": "x"}}, "tfdist run sets TFDIST_PROGRESS for every process itself"),
    ],
)
def test_impossible_options(arguments: dict, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        RunOptions(**arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("options", "show_all", "expected"),
    [
        (RunOptions(1), False, "1 worker on this machine; complete logs in logs/"),
        (RunOptions(2), False, "2 workers on this machine; output of worker 1 goes to logs/"),
        (RunOptions(2), True, "2 workers on this machine; complete logs in logs/"),
        (
            RunOptions(3, chief=True),
            False,
            "1 chief and 2 workers on this machine; output of the other 2 goes to logs/",
        ),
        (
            RunOptions(2, ps=1),
            False,
            "1 chief, 2 workers and 1 ps on this machine; output of the other 3 goes to logs/",
        ),
    ],
)
def test_announcement(options: RunOptions, show_all: bool, expected: str) -> None:
    assert announcement(options, "logs", show_all) == expected
