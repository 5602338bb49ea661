"""The cluster as one process sees it, and what can be wrong with its description, as JSON text or as an object."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfdist.cluster import sockets
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import listed, whole_number

Task = tuple[str, int]
Jobs = dict[str, dict[int, str]]
_JOBS = ("chief", "worker", "ps", "evaluator")
_EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
_SHOWN = 200


class _NoCluster(dict):
    """The jobs of a single process; a type of its own, so that an empty cluster given by mistake is still refused."""


@dataclass(frozen=True)
class ClusterConfig:
    """All tasks with their addresses, and which one of them this process is.

    Attributes:
        jobs: Job name to addresses: a list, or a mapping of task index to `"host:port"` (a sparse cluster). Always the
            mapping after construction, ordered by index. Jobs are `chief`, `worker`, `ps` and `evaluator`.
        task_type: The own job.
        task_index: The own index in that job.
        source: Where the description came from, for messages; two configurations that differ only in it are equal.
        local_rank: Which of the processes that see the same devices of a host this one is; None if it is not known.
        local_size: How many these are.

    Raises:
        ClusterError: With one line for each problem of the description.

    Example:
        >>> config = ClusterConfig({"worker": ["127.0.0.1:2222", "127.0.0.1:2223"]}, "worker", 1)
        >>> config.rank, config.num_workers, config.address, config.is_chief
        (1, 2, '127.0.0.1:2223', False)
    """

    jobs: Mapping[str, Mapping[int, str] | Sequence[str]] = field(hash=False)
    task_type: str = "worker"
    task_index: int = 0
    source: str = field(default="argument", compare=False)
    local_rank: int | None = field(default=None, compare=False)
    local_size: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.jobs, _NoCluster):
            return
        try:
            jobs = _read_jobs(self.jobs)
            index = _read_task(jobs, self.task_type, self.task_index)
        except ClusterError as error:
            prefix = "" if self.source == "argument" else f"{self.source}: "
            raise ClusterError(prefix + problem for problem in error.problems) from None
        object.__setattr__(self, "jobs", jobs)
        object.__setattr__(self, "task_index", index)

    @classmethod
    def single_process(cls, source: str = "single process") -> ClusterConfig:
        """The configuration of a process that has no cluster.

        Example:
            >>> ClusterConfig.single_process().is_chief
            True
        """
        return cls(_NoCluster(), source=source)

    @classmethod
    def from_tf_config(cls, value: str | Mapping[str, object], source: str = "TF_CONFIG") -> ClusterConfig:
        """Reads the form of the TF_CONFIG variable; without a cluster in it, it is a single process.

        Args:
            value: The JSON text, or the object.
            source: Where the value came from, for messages.

        Raises:
            ClusterError: With one line for each problem.

        Example:
            >>> text = '{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 1}}'
            >>> ClusterConfig.from_tf_config(text).address
            'b:2222'
        """
        content = parse(value, source) if isinstance(value, str) else value
        # Kubeflow's TFJob with enableDynamicWorker tells each worker its own address and those of the ps.
        jobs, task = content.get("cluster", content.get("sparseCluster")), content.get("task")
        if jobs is None:
            if problem := _without_cluster(content):
                raise ClusterError(f"{source}: {problem}")
            return cls.single_process(source)
        if not isinstance(task, Mapping) or not {"type", "index"} <= task.keys():
            raise ClusterError(
                f'{source}: "task" is {task!r}; add "task": {{"type": "worker", "index": 0}} with the values of this '
                "process"
            )
        return cls(jobs, task["type"], task["index"], source)

    def to_tf_config(self) -> dict[str, object]:
        """The content of TF_CONFIG: jobs without gaps as lists, others as mappings; `{}` for a single process.

        Example:
            >>> ClusterConfig({"worker": ["a:1"]}).to_tf_config()
            {'cluster': {'worker': ['a:1']}, 'task': {'type': 'worker', 'index': 0}}
        """
        if self.is_single_process:
            return {}
        return {"cluster": self._compact_jobs(), "task": {"type": self.task_type, "index": self.task_index}}

    def to_json(self) -> str:
        """The text for the TF_CONFIG variable.

        Example:
            >>> ClusterConfig.single_process().to_json()
            '{}'
        """
        return json.dumps(self.to_tf_config())

    def with_task(self, job: str, index: int) -> ClusterConfig:
        """The same cluster as another of its tasks sees it.

        Raises:
            ClusterError: If the cluster has no such task.

        Example:
            >>> ClusterConfig({"worker": ["a:1", "b:1"]}).with_task("worker", 1).rank
            1
        """
        return type(self)(self.jobs, job, index, self.source)

    def tasks(self) -> tuple[tuple[str, int, str], ...]:
        """All tasks that have an address, as (job, index, address), in the order of the jobs."""
        return tuple((job, index, place) for job, tasks in self.jobs.items() for index, place in tasks.items())

    @property
    def is_single_process(self) -> bool:
        """Whether there is no cluster at all."""
        return not self.jobs

    @property
    def address(self) -> str | None:
        """The own `host:port`; None for a single process and for an evaluator beside the cluster."""
        return self.jobs.get(self.task_type, {}).get(self.task_index)

    @property
    def compute_tasks(self) -> tuple[Task, ...]:
        """The tasks that train, chief first; their positions are the ranks."""
        if self.is_single_process:
            return ((self.task_type, self.task_index),)
        return tuple((job, index) for job in ("chief", "worker") for index in self.jobs.get(job, ()))

    @property
    def num_workers(self) -> int:
        """How many tasks train."""
        return len(self.compute_tasks)

    @property
    def rank(self) -> int | None:
        """The own position among `compute_tasks`; None for a parameter server or an evaluator."""
        own = (self.task_type, self.task_index)
        return self.compute_tasks.index(own) if own in self.compute_tasks else None

    @property
    def is_chief(self) -> bool:
        """Whether this process has rank 0; true for a single process."""
        return self.rank == 0

    @property
    def chief_address(self) -> str | None:
        """The `host:port` of rank 0; None for a single process or a cluster without compute tasks."""
        if self.is_single_process or not self.compute_tasks:
            return None
        job, index = self.compute_tasks[0]
        return self.jobs[job][index]

    def fingerprint(self) -> str:
        """A short text that is equal exactly when the jobs are: the same on every task of a cluster.

        Example:
            >>> two = ClusterConfig({"worker": ["a:1", "b:1"]})
            >>> two.fingerprint() == two.with_task("worker", 1).fingerprint()
            True
        """
        return hashlib.sha256(json.dumps(self._compact_jobs(), sort_keys=True).encode()).hexdigest()[:12]

    def _compact_jobs(self) -> dict[str, list[str] | dict[str, str]]:
        return {
            job: [*tasks.values()] if [*tasks] == [*range(len(tasks))] else {str(i): tasks[i] for i in tasks}
            for job, tasks in self.jobs.items()
        }

    def __str__(self) -> str:
        if self.is_single_process:
            return "single process"
        own = f"{self.task_type} {self.task_index}"
        place = "no rank" if self.rank is None else f"rank {self.rank} of {self.num_workers}"
        everyone = ", ".join(f"{job} {index} ({where})" for job, index, where in self.tasks())
        return f"{own}, {place}; cluster: {everyone}; from {self.source}"


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
            f"single quotes (') around the whole value. Correct: {source}='{_EXAMPLE}'"
        ) from None
    if not isinstance(value, dict):
        raise ClusterError(f"{source} is {shown}, which is not a JSON object; write it as {_EXAMPLE}")
    return value


def _as_index(value: object) -> int | None:
    """A task index as a number, from a number or from text such as `"1"`; None if it is neither.

    Example:
        >>> _as_index("1"), _as_index(True), _as_index(-1)
        (1, None, None)
    """
    return whole_number(str(value)) if isinstance(value, (int, str)) and not isinstance(value, bool) else None


def _read_jobs(raw: object) -> Jobs:
    """Brings the jobs of a cluster into one form: job to index to address, ordered by index.

    Args:
        raw: A mapping of job names to lists of addresses, or to mappings of task index to address.

    Raises:
        ClusterError: With one line for each problem.

    Example:
        >>> _read_jobs({"worker": {"1": "b:2222"}})
        {'worker': {1: 'b:2222'}}
    """
    if not isinstance(raw, Mapping) or not raw:
        raise ClusterError(f'the cluster is {raw!r}; write {{"worker": ["host:port", ...]}}, or leave the cluster out')
    jobs: Jobs = {}
    problems: list[str] = []
    owners: dict[tuple[str, int], str] = {}
    for job, tasks in raw.items():
        if job not in _JOBS:
            problems.append(f"unknown job {job!r}; valid jobs: {', '.join(_JOBS)}")
        if not isinstance(tasks, (Mapping, list, tuple)) or not tasks:
            problems.append(f'job {job!r} is {tasks!r}; write a list of addresses: ["host:port", ...]')
            continue
        jobs[job] = {}
        for key, place in tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks):
            index, task = _as_index(key), f"{job} {key}"
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


def _read_task(jobs: Jobs, task_type: object, task_index: object) -> int:
    """The index of the own task, which has to be one of the cluster's tasks, or an evaluator.

    Raises:
        ClusterError: If it is none.

    Example:
        >>> _read_task({"worker": {0: "a:1"}}, "worker", "0")
        0
    """
    index = _as_index(task_index)
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


def _without_cluster(content: Mapping[str, Any]) -> str:
    """Why a description without a cluster should have one; empty if it need not.

    Example:
        >>> _without_cluster({"environment": "cloud"})
        ''
        >>> _without_cluster({"clusters": {"worker": ["a:2222"]}}).partition(";")[0]
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
