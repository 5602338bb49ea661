"""What can be wrong with a cluster description, as JSON text or as an object: pure functions that return problems."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence

from tfdist.cluster import sockets
from tfdist.cluster.errors import ClusterError

JOBS = ("chief", "worker", "ps", "evaluator")
# Names that other systems use for the same jobs; a spelling check would not find them.
_ALIASES = {"master": "chief", "parameter_server": "ps", "coordinator": "chief"}

Jobs = dict[str, dict[int, str]]

EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_SHOWN = 200


def parse(text: str, source: str = "TF_CONFIG") -> tuple[dict[str, object], list[str]]:
    """Reads the JSON text of TF_CONFIG, or of a variable like it.

    Args:
        text: The value of the variable.
        source: The variable's name, for messages.

    Returns:
        The object, and a problem for each key that occurs twice in one object: JSON would silently keep the last.

    Raises:
        ClusterError: If the text is not JSON, or not an object.

    Example:
        >>> parse('{"task": {"index": 0, "index": 1}}')[1]
        ['the key "index" is given twice in one object; JSON keeps only the last, so remove one']
    """
    if not text.strip():
        raise ClusterError(
            f"{source} is set, but blank; unset it to train in this process alone, or write it as {EXAMPLE}"
        )
    problems: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        keys = [key for key, _ in pairs]
        for key in dict.fromkeys(key for key in keys if keys.count(key) > 1):
            problems.append(f'the key "{key}" is given twice in one object; JSON keeps only the last, so remove one')
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ClusterError(_not_json(text, error, source)) from None
    except RecursionError:
        raise ClusterError(f"{source} is {_shown(text)}, whose brackets are too deep; write it as {EXAMPLE}") from None
    if not isinstance(value, dict):
        raise ClusterError(f"{source} is {_shown(text)}, which is not a JSON object; write it as {EXAMPLE}")
    return value, problems


def _not_json(text: str, error: json.JSONDecodeError, source: str) -> str:
    if "'" in text and '"' not in text:
        cause = "JSON wants double quotes (\"), not single quotes (')"
    elif '"' not in text:
        cause = "the shell probably removed the double quotes, so put single quotes (') around the whole value"
    else:
        cause = "often the shell's quoting is the cause: put single quotes (') around the whole value"
    where = f"line {error.lineno} column {error.colno} (character {error.pos})"
    wrong = f"{source} is not valid JSON: {error.msg} at {where} of {_shown(text)}"
    return f"{wrong}; {cause}. Correct: {source}='{EXAMPLE}'"


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}... ({len(text)} characters)"


def as_index(value: object) -> int | None:
    """A task index as a number, from a number or from text such as `"1"`; None if it is neither.

    Example:
        >>> as_index("1"), as_index(True), as_index(-1)
        (1, None, None)
    """
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    return None


def normalise(raw: object) -> tuple[Jobs, list[str]]:
    """Brings the jobs of a cluster into one form: job to index to address, ordered by index.

    Args:
        raw: A mapping of job names to lists of addresses, or to mappings of task index to address.

    Returns:
        The jobs, without what could not be understood, and the problems found.

    Example:
        >>> normalise({"worker": {"1": "b:2222"}})
        ({'worker': {1: 'b:2222'}}, [])
    """
    if not isinstance(raw, Mapping):
        got = type(raw).__name__
        return {}, [f'the cluster is a {got}, not an object; write {{"worker": ["host:port", ...]}}']
    jobs: Jobs = {}
    problems: list[str] = []
    for job, tasks in raw.items():
        if isinstance(tasks, Mapping):
            pairs = list(tasks.items())
        elif isinstance(tasks, Sequence) and not isinstance(tasks, str | bytes):
            pairs = list(enumerate(tasks))
        else:
            problems.append(f'job {job!r} is {tasks!r}; write a list of addresses: ["host:port", ...]')
            continue
        entries: dict[int, str] = {}
        for key, place in pairs:
            index = as_index(key)
            if index is None:
                problems.append(f"job {job!r} has the task index {key!r}; use a whole number from 0")
            elif index in entries:
                problems.append(
                    f"{job} {index} is given twice ({entries[index]} and {place}); give each task its own index"
                )
            else:
                entries[index] = place
        if not pairs:
            problems.append(f"job {job!r} has no tasks; add addresses or leave the job out")
        jobs[str(job)] = dict(sorted(entries.items()))
    return jobs, problems


def job_problems(jobs: Jobs) -> list[str]:
    """Problems of the jobs themselves: names, addresses, duplicates, number of chiefs.

    Example:
        >>> job_problems({"wroker": {0: "a:1"}})
        ['unknown job \\'wroker\\'; did you mean "worker"? Valid jobs: chief, worker, ps, evaluator']
    """
    if not jobs:
        return ['the cluster is empty; add at least one job, as {"worker": ["host:port"]}, or leave the cluster out']
    problems = []
    owners: dict[tuple[str, int], str] = {}
    for job, tasks in jobs.items():
        if job not in JOBS:
            problems.append(_unknown(job))
        for index, place in tasks.items():
            task = f"{job} {index}"
            try:
                host, port = sockets.split_address(place)
            except ValueError as error:
                problems.append(f"{task}: {error}")
                continue
            owner = owners.setdefault((host.lower(), port), task)
            if owner != task:
                problems.append(f"{owner} and {task} have the same address {place}; give each task its own port")
    chiefs = len(jobs.get("chief", ()))
    if chiefs > 1:
        problems.append(f"there is more than one chief ({chiefs}); keep one and make the others workers")
    return problems


def task_problems(jobs: Jobs, task_type: object, task_index: object) -> list[str]:
    """Problems of the own task: it has to be one of the cluster's tasks (or an evaluator).

    Example:
        >>> task_problems({"worker": {0: "a:1"}}, "worker", 1)
        ['task worker 1 is not in the cluster; use a task index of job "worker": 0']
    """
    index = as_index(task_index)
    if not isinstance(task_type, str):
        return [_unknown(task_type, "task type")]
    if task_type not in jobs:
        if task_type == "evaluator":  # TensorFlow lets an evaluator stand beside the cluster
            return [] if index is not None else [_bad_index(task_index)]
        if task_type not in JOBS:
            return [_unknown(task_type, "task type")]
        if any(_meant(job) == task_type for job in jobs):
            return []  # the job's name has a mistake, which is reported already
        return [f"task type {task_type!r} is not in the cluster; use one of its jobs: {', '.join(jobs)}"]
    if index is None:
        return [_bad_index(task_index)]
    if index not in jobs[task_type]:
        valid = _ranges(sorted(jobs[task_type]))
        return [f'task {task_type} {index} is not in the cluster; use a task index of job "{task_type}": {valid}']
    return []


def _bad_index(value: object) -> str:
    return f"the task index is {value!r}; use a whole number from 0"


def _unknown(name: object, what: str = "job") -> str:
    near = _meant(name)
    hint = f'did you mean "{near}"? Valid jobs' if near else "valid jobs"
    return f"unknown {what} {name!r}; {hint}: {', '.join(JOBS)}"


def _meant(name: object) -> str | None:
    """The job that an unknown name is likely to stand for."""
    name = str(name).lower()
    return _ALIASES.get(name) or next(iter(difflib.get_close_matches(name, JOBS, 1)), None)


def _ranges(indexes: list[int]) -> str:
    if len(indexes) > 2 and indexes[-1] - indexes[0] == len(indexes) - 1:
        return f"{indexes[0]} to {indexes[-1]}"
    return ", ".join(map(str, indexes)) or "none"


def without_cluster(content: Mapping[str, object]) -> list[str]:
    """The signs that a description without a cluster should have one.

    Example:
        >>> without_cluster({"environment": "cloud"})
        []
        >>> without_cluster({"clusters": {"worker": ["a:2222"]}})[0].partition(";")[0]
        '"cluster" is missing, beside the keys "clusters"'
    """
    if "cluster" in content:
        return ['"cluster" is null; write it as {"worker": ["host1:2222", "host2:2222"]}, or leave it out']
    # What clouds write for a program of one process.
    others = content.keys() - {"environment", "job", "rpc_layer", "task"}
    task = content.get("task")
    if isinstance(task, Mapping) and {"type", "index"} & task.keys():
        others.add("task")
    if not others:
        return []
    keys = ", ".join(f'"{key}"' for key in sorted(others))
    return [
        f'"cluster" is missing, beside the keys {keys}; add "cluster": {{"worker": ["host1:2222", "host2:2222"]}}, or '
        "write {} to train in this process alone"
    ]
