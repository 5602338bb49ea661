"""The barrier: all tasks meet before TensorFlow starts, so that none of them waits in vain inside TensorFlow.

The first time they meet at the chief's own address, before TensorFlow's server takes it, unless they are connected
since their rendezvous. Then they stay connected (server.py): a later meeting goes through the same connections.
"""

from __future__ import annotations

import collections
import errno
import hmac
import json
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

from tfdist import json_schema
from tfdist.cluster import server, sockets
from tfdist.cluster.config import ClusterConfig, Task
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.server import BarrierTimeoutError, Client, JobUnderWayError, Server, Store
from tfdist.cluster.sockets import UnreachedError
from tfdist.cluster.variables import TOKEN

MAX_BYTES = 64 * 1024
BIND_SECONDS = 5.0  # a process of an earlier run may need a moment to end
_SHOWN = 2000
_INTRODUCTION = {"task": str, "fingerprint": str, "jobs": str, "info": json_schema.ANY_OBJECT}
# By cluster, number of tasks and rank: the store of a process that has met the others, and how often it has.
_stores: dict[tuple[str, int, int], tuple[Store, collections.Counter[str]]] = {}


def meet(
    config: ClusterConfig,
    timeout: float = 300.0,
    info: dict | None = None,
    servers: bool = False,
    rejoin: bool = False,
    topic: str = "barrier",
) -> dict[int, dict]:
    """Waits until every compute task is there, and exchanges a small dictionary among them.

    With TFDIST_TOKEN, which is then the same on all tasks, or else the secret by which they have met at the rendezvous,
    nobody takes part who does not know it.

    Args:
        config: The cluster as this process sees it.
        timeout: How many seconds to wait for everybody.
        info: What to tell the others; JSON values. Keys that start with `same.` must be equal on all tasks.
        servers: Whether the parameter servers come as well; all tasks must agree on that.
        rejoin: Whether to raise `JobUnderWayError` if the others have met already, and the chief runs a TensorFlow
            server; otherwise this waits for its next barrier.
        topic: What it is about: all tasks come equally often to each topic.

    Returns:
        The `info` of every task, by rank; those of parameter servers follow in their order.

    Raises:
        BarrierTimeoutError: If a task has not come in time; names it.
        ClusterError: If the tasks do not fit together: different clusters, the same task twice, different values of a
            `same.` key; or if this task takes no part (an evaluator, or a parameter server without `servers`).

    Example:
        >>> meet(ClusterConfig.single_process(), info={"same.keras": "3.15.0"})
        {0: {'same.keras': '3.15.0'}}
    """
    info = {} if info is None else info
    present = members(config, servers)
    if (config.task_type, config.task_index) not in present:
        raise ClusterError(
            f"{config.task_type} {config.task_index} takes no part in the barrier; only chief"
            f"{', worker and ps' if servers else ' and worker'} tasks do"
        )
    if len(present) == 1:
        return {0: info}
    key = _key(config, present)
    store, counts = _stores.pop(key, (None, collections.Counter()))
    if isinstance(store, Client) and store.is_lost:
        store, counts = None, collections.Counter()  # the chief was started again
    counts[topic] += 1
    barrier = _Barrier(config, present, info, timeout, f"{topic} {counts[topic]}")
    store, infos = barrier.call(store) if config.is_chief else barrier.come(store, rejoin)
    _stores[key] = store, counts
    return infos


def store_of(config: ClusterConfig) -> Store:
    """What the tasks of a cluster that train, and have met, keep for each other."""
    return _stores[_key(config, members(config, servers=False))][0]


def keep(config: ClusterConfig, store: Store) -> None:
    """Notes that this process is connected to the others of a cluster, all of its tasks."""
    _stores[_key(config, members(config, servers=True))] = store, collections.Counter()


def members(config: ClusterConfig, servers: bool) -> tuple[Task, ...]:
    """Who comes to the barrier, by rank: the compute tasks and, where asked for, the parameter servers after them.

    Example:
        >>> members(ClusterConfig({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}, "chief"), servers=True)
        (('chief', 0), ('worker', 0), ('ps', 0))
    """
    return (*config.compute_tasks, *(("ps", index) for index in config.jobs.get("ps", ()) if servers))


def named(config: ClusterConfig, tasks: Iterable[Task]) -> list[str]:
    """Tasks with their addresses, for messages.

    Example:
        >>> named(ClusterConfig({"worker": ["a:1", "b:1"]}), [("worker", 1)])
        ['worker 1 (b:1)']
    """
    return [f"{job} {index} ({config.jobs[job][index]})" for job, index in tasks]


def _key(config: ClusterConfig, present: tuple[Task, ...]) -> tuple[str, int, int]:
    return config.fingerprint(), len(present), present.index((config.task_type, config.task_index))


class _Barrier:
    """One barrier, to be called by the chief, and come to by the others."""

    def __init__(self, config: ClusterConfig, present: tuple[Task, ...], info: dict, timeout: float, name: str) -> None:
        self._config, self._present, self._timeout, self._name = config, present, timeout, name
        token = os.environ.get(TOKEN, "").encode()
        self._secret = hmac.digest(token, b"", "sha256") if token else b""
        self._task = f"{config.task_type} {config.task_index}"
        who = f"{self._task}, process {os.getpid()} on {socket.gethostname()}"
        self._hello = server.hello(present.index((config.task_type, config.task_index)), who)
        self._own = introduction(config, info)

    def call(self, store: Server | None) -> tuple[Server, dict[int, dict]]:
        """The chief's part."""
        store = store or self._server()
        try:
            came = store.collect(
                self._name,
                self._own,
                self._timeout,
                self._names,
                check=lambda said: disagreements(self._own, read_introduction(said)),
            )
            infos = {rank: told["info"] for rank, told in came.items()}
            store.publish(self._name, {"infos": list(infos.values())})
        except BaseException:
            store.leave()
            raise
        return store, infos

    def _server(self) -> Server:
        host, port = sockets.split_address(self._config.chief_address)
        hosts = {sockets.split_address(place)[0] for _, _, place in self._config.tasks()}
        until = time.monotonic() + min(self._timeout, BIND_SECONDS)
        while True:
            try:
                # A cluster on one machine needs no port that is open to the network. Otherwise the host name may stand
                # for another address here than elsewhere, so listen on all addresses, as TensorFlow does.
                alone = sockets.is_loopback(host)
                bound = sockets.bind_host(host, port) if alone else sockets.bind_everywhere(port, reuse=True)
                return Server(bound, self._secret, len(self._present), self._hello, hosts)
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                    raise ClusterError(
                        f"{self._task} cannot listen on its address {self._config.chief_address}: {error.strerror}; "
                        "another process listens there or claims the same task: stop it, or choose another port"
                    ) from error
                time.sleep(0.1)

    def _names(self, ranks: Iterable[int]) -> list[str]:
        return named(self._config, [self._present[rank] for rank in ranks])

    def come(self, store: Client | None, rejoin: bool) -> tuple[Client, dict[int, dict]]:
        """The part of the other tasks."""
        (chief,) = self._names([0])
        place = sockets.split_address(self._config.chief_address)

        def unreached(seen: str) -> str:
            return (
                f"{self._task} could not reach the chief, {chief}, within start_timeout={self._timeout:g} s: {seen}; "
                "start it, look into its output for why it did not start, and check the address and that no firewall "
                "is in between"
            )

        client, over, infos = server.attend(
            *(self._task, chief, [place], self._secret, self._hello, self._name),
            *(lambda client: self._own, lambda result: infos_of(result, len(self._present)), self._timeout, unreached),
            before=store,
            rejoin=rejoin,
        )
        if over:
            client.leave()
            problem = f"{self._task}: the others have met already: a job is under way"
            raise (JobUnderWayError if rejoin else BarrierTimeoutError)(problem)
        return client, infos


def introduction(config: ClusterConfig, info: dict) -> dict:
    """What a task tells the others.

    Raises:
        TypeError: If `info` contains anything else than JSON values.
        ValueError: If `info` is too large.
    """
    size = len(json.dumps(info))
    if size > MAX_BYTES - 2 * _SHOWN:
        raise ValueError(f"info takes {size} bytes; keep it below {MAX_BYTES - 2 * _SHOWN}")
    jobs = json.dumps(config.to_tf_config()["cluster"])
    return {
        "task": f"{config.task_type} {config.task_index}",
        "fingerprint": config.fingerprint(),
        "jobs": jobs if len(jobs) <= _SHOWN else f"{jobs[:_SHOWN]}...",
        "info": info,
    }


def read_introduction(said: Any) -> dict:
    """An introduction with texts that are fit to be printed.

    Raises:
        ValueError: If it is something else.

    Example:
        >>> read_introduction({"task": "a\\n", "fingerprint": "x", "jobs": "", "info": {}})["task"]
        'a\\\\n'
    """
    json_schema.check(said, _INTRODUCTION)
    return {**said, **{key: cleaned(said[key], _SHOWN + 3) for key in ("task", "fingerprint", "jobs")}}


def disagreements(own: dict, other: dict) -> list[str]:
    """Why two tasks, by their introductions, cannot train together.

    Example:
        >>> a = {"task": "worker 0", "fingerprint": "x", "jobs": "", "info": {"same.keras": "3.1"}}
        >>> disagreements(a, {**a, "task": "worker 1", "info": {"same.keras": "3.2"}})
        ['keras is 3.1 on worker 0 but 3.2 on worker 1; make it the same on every task']
    """
    if own["fingerprint"] != other["fingerprint"]:
        return [
            f"{own['task']} and {other['task']} have different cluster descriptions; "
            f'give every task the same "cluster". {own["task"]} ({own["fingerprint"]}): {own["jobs"]}; '
            f"{other['task']} ({other['fingerprint']}): {other['jobs']}"
        ]
    keys = sorted(key for key in own["info"].keys() | other["info"].keys() if key.startswith("same."))
    return [
        cleaned(
            f"{key.removeprefix('same.')} is {own['info'].get(key)} on {own['task']} but {other['info'].get(key)} on "
            f"{other['task']}; make it the same on every task"
        )
        for key in keys
        if own["info"].get(key) != other["info"].get(key)
    ]


def infos_of(text: object, size: int) -> dict[int, dict]:
    """The infos of so many tasks, by rank.

    Raises:
        UnreachedError: If it is something else.

    Example:
        >>> infos_of(server.pack({"infos": [{"a": 1}, {}]}), 2)
        {0: {'a': 1}, 1: {}}
    """
    found = server.unpack(text, MAX_BYTES * size).get("infos")
    if not isinstance(found, list) or len(found) != size or not all(isinstance(info, dict) for info in found):
        raise UnreachedError("it sends something else than what all tasks have said")
    return dict(enumerate(found))
