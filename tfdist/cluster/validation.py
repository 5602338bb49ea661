"""What can be wrong with a cluster description, as JSON text or as an object."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tfdist.cluster import sockets
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import listed, whole_number

JOBS = ("chief", "worker", "ps", "evaluator")
Jobs = dict[str, dict[int, str]]

EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_SHOWN = 200


def parse(text: str, source: str = "TF_CONFIG") -> dict[str, Any]:
    """Reads the JSON text of TF_CONFIG, or of a variable like it.

    Args:
        text: The value of the variable.
        source: The variable's name, for messages.

    Raises:
        ClusterError: If the text is not JSON, or not an object.

    Example:
        >>> parse('{"task": {"index": 1}}')
        {'task': {'index': 1}}
    """
    shown = repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"{source} is {shown}, which is not valid JSON ({error}); often the shell's quoting is the cause: put "
            f"single quotes (') around the whole value. Correct: {source}='{EXAMPLE}'"
        ) from None
    if not isinstance(value, dict):
        raise ClusterError(f"{source} is {shown}, which is not a JSON object; write it as {EXAMPLE}")
    return value


def as_index(value: object) -> int | None:
    """A task index as a number, from a number or from text such as `"1"`; None if it is neither.

    Example:
        >>> as_index("1"), as_index(True), as_index(-1)
        (1, None, None)
    """
    return whole_number(str(value)) if isinstance(value, (int, str)) and not isinstance(value, bool) else None


def read_jobs(raw: object) -> Jobs:
    """Brings the jobs of a cluster into one form: job to index to address, ordered by index.

    Args:
        raw: A mapping of job names to lists of addresses, or to mappings of task index to address.

    Raises:
        ClusterError: With one line for each problem.

    Example:
        >>> read_jobs({"worker": {"1": "b:2222"}})
        {'worker': {1: 'b:2222'}}
    """
    if not isinstance(raw, Mapping) or not raw:
        raise ClusterError(f'the cluster is {raw!r}; write {{"worker": ["host:port", ...]}}, or leave the cluster out')
    jobs: Jobs = {}
    problems: list[str] = []
    owners: dict[tuple[str, int], str] = {}
    for job, tasks in raw.items():
        if job not in JOBS:
            problems.append(f"unknown job {job!r}; valid jobs: {', '.join(JOBS)}")
        if not isinstance(tasks, (Mapping, list, tuple)) or not tasks:
            problems.append(f'job {job!r} is {tasks!r}; write a list of addresses: ["host:port", ...]')
            continue
        jobs[job] = {}
        for key, place in tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks):
            index, task = as_index(key), f"{job} {key}"
            try:
                host, port = sockets.split_address(place)
            except ValueError as error:
                problems.append(f"{task}: {error}")
                continue
            owner = owners.setdefault((host.lower(), port), task)
            if index is None or index in jobs[job]:
                problems.append(f"job {job!r} has the task index {key!r}; use whole numbers from 0, each once")
            elif owner != task:
                problems.append(f"{owner} and {task} have the same address {place}; give each task its own port")
            else:
                jobs[job][index] = place
    if len(chiefs := jobs.get("chief", ())) > 1:
        problems.append(f"there is more than one chief ({len(chiefs)}); keep one and make the others workers")
    if problems:
        raise ClusterError(problems)
    return {job: dict(sorted(tasks.items())) for job, tasks in jobs.items()}


def read_task(jobs: Jobs, task_type: object, task_index: object) -> int:
    """The index of the own task, which has to be one of the cluster's tasks, or an evaluator.

    Raises:
        ClusterError: If it is none.

    Example:
        >>> read_task({"worker": {0: "a:1"}}, "worker", "0")
        0
    """
    index = as_index(task_index)
    if index is None:
        raise ClusterError(f"the task index is {task_index!r}; use a whole number from 0")
    if task_type == "evaluator" and "evaluator" not in jobs:  # TensorFlow lets one stand beside the cluster
        return index
    if not isinstance(task_type, str) or task_type not in jobs:
        raise ClusterError(f"task type {task_type!r} is not in the cluster; use one of its jobs: {', '.join(jobs)}")
    if index not in jobs[task_type]:
        valid = listed([*map(str, jobs[task_type])])
        raise ClusterError(
            f'task {task_type} {index} is not in the cluster; use a task index of job "{task_type}": {valid}'
        )
    return index


def without_cluster(content: Mapping[str, Any]) -> str:
    """Why a description without a cluster should have one; empty if it need not.

    Example:
        >>> without_cluster({"environment": "cloud"})
        ''
        >>> without_cluster({"clusters": {"worker": ["a:2222"]}}).partition(";")[0]
        '"cluster" is missing, or null, beside "clusters"'
    """
    # What clouds write for a program of one process.
    others = content.keys() - {"environment", "job", "rpc_layer", "task"}
    task = content.get("task")
    if isinstance(task, Mapping) and {"type", "index"} & task.keys():
        others.add("task")
    if not others:
        return ""
    keys = ", ".join(f'"{key}"' for key in sorted(others))
    return (
        f'"cluster" is missing, or null, beside {keys}; add "cluster": {{"worker": ["host1:2222", "host2:2222"]}}, or '
        "write {} to train in this process alone"
    )
