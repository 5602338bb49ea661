"""Every wrong cluster description and the message it gets."""

from __future__ import annotations

import json

import pytest

from tfdist.cluster import ClusterConfig, ClusterError

WRONG_JOBS = [
    ({}, ["the cluster is empty", "or leave the cluster out"]),
    ({"worker": []}, ["job 'worker' has no tasks; add addresses or leave the job out"]),
    ({"wroker": ["a:1"]}, ["unknown job 'wroker'", 'did you mean "worker"?', "chief, worker, ps, evaluator"]),
    ({"master": ["a:1"]}, ["unknown job 'master'", 'did you mean "chief"?']),
    ({"zzz": ["a:1"]}, ["unknown job 'zzz'; valid jobs: chief, worker, ps, evaluator"]),
    ({"worker": "a:1"}, ["job 'worker' is 'a:1'; write a list of addresses"]),
    ({"worker": 3}, ["job 'worker' is 3; write a list of addresses"]),
    (["a:1"], ["the cluster is a list, not an object"]),
    ({"worker": {"x": "a:1"}}, ["task index 'x'; use a whole number from 0"]),
    ({"worker": {"1": "a:1", 1: "b:1"}}, ["worker 1 is given twice (a:1 and b:1); give each task its own index"]),
    ({"worker": ["a"]}, ["worker 0: address 'a' has no host or no port", '"host:port"']),
    ({"worker": ["a:"]}, ["address 'a:' has no host or no port"]),
    ({"worker": [":1"]}, ["address ':1' has no host or no port"]),
    ({"worker": ["[::1]"]}, ["address '[::1]' has no host or no port"]),
    ({"worker": ["::1:5"]}, ["ambiguous; write an IPv6 address in brackets"]),
    ({"worker": ["a:0"]}, ["has port 0; use a number from 1 to 65535"]),
    ({"worker": ["a:65536"]}, ["has port 65536; use a number from 1 to 65535"]),
    ({"worker": ["a:http"]}, ["has port http; use a number from 1 to 65535"]),
    ({"worker": ["grpc://a:1"]}, ["starts with a protocol; write only"]),
    ({"worker": ["a :1"]}, ["contains white space"]),
    ({"worker": [None]}, ["address None is not text"]),
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
    ("wrker", 0, ["unknown task type 'wrker'", 'did you mean "worker"?']),
    (["worker"], 0, ["unknown task type ['worker']"]),
]


@pytest.mark.parametrize(("jobs", "words"), WRONG_JOBS, ids=[str(jobs) for jobs, _ in WRONG_JOBS])
def test_wrong_jobs(jobs: object, words: list[str]) -> None:
    task = "chief" if isinstance(jobs, dict) and "chief" in jobs else "worker"
    for build in (
        lambda: ClusterConfig(jobs, task),  # type: ignore[arg-type]
        lambda: ClusterConfig.from_tf_config({"cluster": jobs, "task": {"type": task, "index": 0}}),
    ):
        with pytest.raises(ClusterError) as caught:
            build()
        for word in words:
            assert word in str(caught.value)


@pytest.mark.parametrize(("task_type", "index", "words"), WRONG_TASKS)
def test_wrong_task(task_type: str, index: object, words: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterConfig({"worker": ["a:1", "b:1"]}, task_type, index)  # type: ignore[arg-type]
    assert len(caught.value.problems) == 1
    for word in words:
        assert word in str(caught.value)


def test_the_task_of_a_misspelt_job_is_no_second_problem() -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterConfig({"wroker": ["a:1", "b:1"]}, "worker", 0)
    assert caught.value.problems == [
        "unknown job 'wroker'; did you mean \"worker\"? Valid jobs: chief, worker, ps, evaluator"
    ]


def test_a_long_range_of_indexes_is_shortened() -> None:
    with pytest.raises(ClusterError, match=r'job "worker": 0 to 9$'):
        ClusterConfig({"worker": [f"h{i}:1" for i in range(10)]}, "worker", 10)


def test_all_problems_at_once() -> None:
    cluster = '{"worker": ["a", "b:0"], "master": ["c:1"], "master": ["c:2"]}'
    text = f'{{"cluster": {cluster}, "task": {{"type": "ps", "index": 0}}}}'
    with pytest.raises(ClusterError) as caught:
        ClusterConfig.from_tf_config(text)
    problems = caught.value.problems
    assert len(problems) == 5
    assert all(problem.startswith("TF_CONFIG: ") for problem in problems)
    for number, word in enumerate(["given twice in one object", "'a'", "port 0", "'master'", "task type 'ps'"]):
        assert word in problems[number]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"cluster": {"worker": {"0": "a:1", "0": "b:1"}}, "task": {"type": "worker", "index": 0}}', "0"),
        ('{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0, "index": 0}}', "index"),
        ('{"cluster": {"worker": ["a:1"]}, "cluster": {}}', "cluster"),
        ('{"task": {}, "task": {}}', "task"),
    ],
)
def test_duplicate_keys(text: str, key: str) -> None:
    with pytest.raises(ClusterError, match=f'the key "{key}" is given twice in one object.*remove one'):
        ClusterConfig.from_tf_config(text)


@pytest.mark.parametrize(
    ("task", "got"),
    [(None, '"task" is missing'), ({"type": "worker"}, "\"task\" is {'type': 'worker'}"), (3, '"task" is 3')],
)
def test_missing_task(task: object, got: str) -> None:
    content = {"cluster": {"worker": ["a:1", "b"]}, "task": task}
    with pytest.raises(ClusterError) as caught:
        ClusterConfig.from_tf_config(content)
    assert len(caught.value.problems) == 2
    assert "address 'b' has no host or no port" in caught.value.problems[0]
    assert got in caught.value.problems[1]
    assert 'add "task": {"type": "worker", "index": 0}' in caught.value.problems[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{'cluster': {}}", ["line 1 column 2 (character 1)", "double quotes (\"), not single quotes (')"]),
        ("{cluster: {worker: [a:1]}}", ["column 2", "the shell probably removed the double quotes"]),
        ('{"cluster": {"worker": ["a:1"]}', ["character 31", "put single quotes (') around the whole value"]),
        ('{"cluster": ' + "1" * 500, ["... (512 characters)"]),
    ],
)
def test_not_json(text: str, words: list[str]) -> None:
    with pytest.raises(ClusterError) as caught:
        ClusterConfig.from_tf_config(text)
    message = str(caught.value)
    assert len(caught.value.problems) == 1
    for word in ["TF_CONFIG is not valid JSON", repr(text[:100])[:-1], *words]:
        assert word in message
    example = message.partition("Correct: TF_CONFIG='")[2].removesuffix("'")
    assert ClusterConfig.from_tf_config(json.loads(example)).num_workers == 2


@pytest.mark.parametrize("text", ["[]", "3", '"x"', "null"])
def test_json_but_not_an_object(text: str) -> None:
    with pytest.raises(ClusterError, match="which is not a JSON object; write it as"):
        ClusterConfig.from_tf_config(text)


def test_with_task_refuses_what_is_not_there() -> None:
    with pytest.raises(ClusterError, match="worker 4 is not in the cluster"):
        ClusterConfig({"worker": ["a:1"]}).with_task("worker", 4)
