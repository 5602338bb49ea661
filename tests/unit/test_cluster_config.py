"""Reading, writing and describing clusters; every wrong description and the message it gets."""

from __future__ import annotations

import json

import pytest

from tfdist.cluster import ClusterConfig, ClusterError, discover

TWO = {"worker": ["a:1", "b:2"]}
ROUND_TRIPS = [
    {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
    {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}},
    {"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": {"type": "chief", "index": 0}},
    {"cluster": {"worker": {"1": "b:1"}}, "task": {"type": "worker", "index": 1}},
    {"cluster": {"worker": {"0": "a:1", "3": "b:1"}, "ps": ["p:1"]}, "task": {"type": "ps", "index": 0}},
    {"cluster": {"worker": ["[::1]:1", "[fe80::1]:65535"]}, "task": {"type": "worker", "index": 0}},
    {"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}},
    {"cluster": {"worker": ["a:1"], "evaluator": ["e:1"]}, "task": {"type": "evaluator", "index": 0}},
    {"cluster": {"worker": [f"h{i}:2222" for i in range(12)]}, "task": {"type": "worker", "index": 11}},
    {},
]


@pytest.mark.parametrize("content", ROUND_TRIPS)
def test_round_trip(content: dict) -> None:
    config = ClusterConfig.from_tf_config(json.dumps(content))
    assert config.to_tf_config() == content
    assert json.loads(config.to_json()) == content
    assert ClusterConfig.from_tf_config(content) == config
    assert ClusterConfig.from_tf_config(config.to_json()).to_json() == config.to_json()


@pytest.mark.parametrize(
    ("jobs", "task", "rank", "num_workers", "chief", "address"),
    [
        (TWO, ("worker", 0), 0, 2, "a:1", "a:1"),
        (TWO, ("worker", 1), 1, 2, "a:1", "b:2"),
        ({"worker": ["w:1"], "chief": ["c:1"]}, ("worker", 0), 1, 2, "c:1", "w:1"),
        ({"worker": ["w:1"], "chief": ["c:1"]}, ("chief", 0), 0, 2, "c:1", "c:1"),
        ({"worker": {"5": "w:1", "3": "v:1"}}, ("worker", 5), 1, 2, "v:1", "w:1"),
        ({"worker": ["w:1"], "ps": ["p:1"]}, ("ps", 0), None, 1, "w:1", "p:1"),
        ({"worker": ["w:1"]}, ("evaluator", 0), None, 1, "w:1", None),
        ({"ps": ["p:1"]}, ("ps", 0), None, 0, None, "p:1"),
    ],
)
def test_ranks(
    jobs: dict, task: tuple[str, int], rank: int | None, num_workers: int, chief: str | None, address: str | None
) -> None:
    config = ClusterConfig(jobs, *task)
    assert (config.rank, config.num_workers, config.chief_address, config.address) == (
        rank,
        num_workers,
        chief,
        address,
    )
    assert config.is_chief == (rank == 0)
    assert not config.is_single_process


@pytest.mark.parametrize("content", ["{}", '{"task": {"cloud": "c"}, "job": {}}', '{"environment": "cloud"}'])
def test_without_a_cluster_it_is_a_single_process(content: str) -> None:
    config = ClusterConfig.from_tf_config(content)
    assert config.is_single_process
    assert config.is_chief
    assert (config.rank, config.num_workers, config.address, config.chief_address) == (0, 1, None, None)
    assert config == ClusterConfig.single_process()
    assert str(config) == "single process"


def test_fingerprint_is_that_of_the_jobs() -> None:
    one = ClusterConfig({"chief": ["c:1"], "worker": ["a:1", "b:2"]}, "chief", 0)
    other = ClusterConfig({"worker": {"1": "b:2", "0": "a:1"}, "chief": ["c:1"]}, "worker", 1, "elsewhere")
    assert one.fingerprint() == other.fingerprint() == one.with_task("evaluator", 0).fingerprint()
    assert one.fingerprint() != ClusterConfig({"chief": ["c:1"], "worker": ["b:2", "a:1"]}).fingerprint()
    assert len(one.fingerprint()) == 12


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Received: TF_CONFIG, which is set, but blank"),
        (" \n", "unset TF_CONFIG to train in this process alone"),
        ('{"task": {"type": "worker", "index": 0}}', '"cluster" is missing, or null, beside "task"'),
        (
            '{"cluster": null, "task": {"type": "worker", "index": 0}}',
            '"cluster" is missing, or null, beside "cluster", "task"',
        ),
        ('{"clusters": {"worker": ["a:1"]}}', '"cluster" is missing, or null, beside "clusters"'),
    ],
)
def test_what_was_meant_to_have_a_cluster(content: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        discover({"TF_CONFIG": content})


def test_discover_order() -> None:
    text = ClusterConfig(TWO, "worker", 1).to_json()
    assert discover({}).source == "single process"
    assert discover({"TF_CONFIG": text}).source == "TF_CONFIG"
    assert discover({"TF_CONFIG": text}).rank == 1
    both = discover({"TF_CONFIG": text, "TFDIST_CLUSTER": text})
    assert (both.source, both.rank) == ("TFDIST_CLUSTER", 1)
    assert discover({"TFDIST_CLUSTER": text}).rank == 1


def test_discover_refuses_two_different_clusters() -> None:
    config = ClusterConfig(TWO)
    env = {"TF_CONFIG": config.with_task("worker", 1).to_json(), "TFDIST_CLUSTER": config.to_json()}
    with pytest.raises(ClusterError) as caught:
        discover(env)
    message = str(caught.value)
    assert message.startswith("TFDIST_CLUSTER and TF_CONFIG disagree: TFDIST_CLUSTER says worker 0")
    assert "TF_CONFIG says worker 1" in message
    assert "unset TFDIST_CLUSTER" in message
    assert len(caught.value.problems) == 1


WRONG_JOBS = [
    ({}, ["the cluster is {}", "or leave the cluster out"]),
    ({"worker": []}, ["job 'worker' is []; write a list of addresses"]),
    ({"wroker": ["a:1"]}, ["unknown job 'wroker'; valid jobs: chief, worker, ps, evaluator"]),
    ({"worker": "a:1"}, ["job 'worker' is 'a:1'; write a list of addresses"]),
    ({"worker": 3}, ["job 'worker' is 3; write a list of addresses"]),
    (["a:1"], ["the cluster is ['a:1']; write"]),
    ({"worker": {"x": "a:1"}}, ["task index 'x'; use whole numbers from 0"]),
    ({"worker": {"1": "a:1", 1: "b:1"}}, ["task index 1; use whole numbers from 0, each once"]),
    *(
        ({"worker": [place]}, [f'worker 0: address {place!r} is not of the form "host:port"', "a port from 1 to 65535"])
        for place in ("a", "a:", ":1", "[::1]", "::1:5", "a:0", "a:65536", "a:http", "grpc://a:1", "a :1", None)
    ),
    ({"worker": ["a:1", "A:1"]}, ["worker 0 and worker 1 have the same address A:1; give each task its own port"]),
    ({"chief": ["a:1"], "worker": ["a:1"]}, ["chief 0 and worker 0 have the same address a:1"]),
    ({"chief": ["a:1", "b:1"], "worker": ["c:1"]}, ["more than one chief (2); keep one and make the others workers"]),
]
WRONG_TASKS = [
    ("worker", 2, ["task worker 2 is not in the cluster", 'use a task index of job "worker": 0, 1']),
    ("worker", -1, ["the task index is -1; use a whole number from 0"]),
    ("worker", "one", ["the task index is 'one'; use a whole number from 0"]),
    ("worker", True, ["the task index is True; use a whole number from 0"]),
    ("worker", 0.0, ["the task index is 0.0; use a whole number from 0"]),
    ("evaluator", None, ["the task index is None; use a whole number from 0"]),
    ("ps", 0, ["task type 'ps' is not in the cluster; use one of its jobs: worker"]),
    (["worker"], 0, ["task type ['worker'] is not in the cluster"]),
]


def said_of(content: object) -> list[str]:
    with pytest.raises(ClusterError) as caught:
        ClusterConfig.from_tf_config(content)  # type: ignore[arg-type]
    return caught.value.problems


@pytest.mark.parametrize(("jobs", "words"), WRONG_JOBS, ids=[str(jobs) for jobs, _ in WRONG_JOBS])
def test_wrong_jobs(jobs: object, words: list[str]) -> None:
    task = "chief" if isinstance(jobs, dict) and "chief" in jobs else "worker"
    with pytest.raises(ClusterError) as caught:
        ClusterConfig(jobs, task)  # type: ignore[arg-type]
    read = said_of({"cluster": jobs, "task": {"type": task, "index": 0}})
    for word in words:
        assert word in str(caught.value) and word in "\n".join(read)


@pytest.mark.parametrize(("task_type", "index", "words"), WRONG_TASKS)
def test_wrong_task(task_type: str, index: object, words: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterConfig({"worker": ["a:1", "b:1"]}, task_type, index)  # type: ignore[arg-type]
    (problem,) = caught.value.problems
    assert [word for word in words if word not in problem] == []


ONE = '"cluster": {"worker": ["a:1"]}'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"cluster": {"worker": ["a", "b:0"]}, "task": {"type": "worker", "index": 0}}', ["'a'", "'b:0'"]),
        (f"{{{ONE}}}", ['add "task": {"type": "worker", "index": 0}']),
        (f'{{{ONE}, "task": 3}}', ['"task" is 3']),
        ("{'cluster': {}}", ["line 1 column 2 (char 1)", "put single quotes (') around the whole value"]),
        ('{"cluster": ' + "1" * 500, ["... (512 characters)"]),
        ("[]", ["which is not a JSON object; write it as"]),
    ],
)
def test_what_cannot_be_read(text: str, words: list[str]) -> None:
    problems = said_of(text)
    assert all(problem.startswith("TF_CONFIG") for problem in problems)
    assert [word for word in words if word not in "\n".join(problems)] == []


def test_the_example_in_a_message_is_right() -> None:
    (problem,) = said_of("{'cluster': {}}")
    example = problem.partition("Correct: TF_CONFIG='")[2].removesuffix("'")
    assert ClusterConfig.from_tf_config(json.loads(example)).num_workers == 2
