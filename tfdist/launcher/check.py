"""`tfdist check`: whether the processes of a job, started as the training will be, could train together.

They meet, connect to each other, and let TensorFlow sum up in processes of their own; rank 0 prints the result.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tfdist import json_schema
from tfdist.cluster import ports, preflight, sockets
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover, find
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned
from tfdist.cluster.gpus import visible_gpus
from tfdist.cluster.meeting import meet
from tfdist.cluster.meeting import members as tasks_of
from tfdist.cluster.rendezvous.endpoints import host_name, port_range
from tfdist.cluster.variables import DIRECT, TENSORFLOW
from tfdist.launcher.operating_system import die_with_parent
from tfdist.launcher.plan import LOG_LEVEL, QUIET, public_addresses, usable_cores, versions

# With other versions of these, processes cannot train together, or would not compute the same.
COMPARED = ("tfdist", "tensorflow", "keras", "python")
# Of larger jobs, one process of each host connects, on so many hosts. A table of all pairs fits on a screen.
_CONNECTING, _SHOWN = 16, 8
_TRIES = 3
_CONNECT_SECONDS, _WAYS_SECONDS = 5.0, 30.0
# Starting TensorFlow reads some gigabytes on every host; then come the sums, of which the second has to connect again.
_SUM_SECONDS, _DIRECT_SECONDS = 180.0, 30.0
_BYTES = 4 << 20
_CARRIERS = {TENSORFLOW: "TensorFlow's all-reduce", DIRECT: "tfdist's own transport"}
_LONGEST_NAME, _LONGEST_TEXT = 100, 5000
_LAST_LINES = 30

_MEMBER = {"task": str, "address": str, "host": str, "cores": int, "gpus": int, "versions": {...: str}, "public": [str]}
_INTRODUCTION = {"member": _MEMBER, "port": lambda value: value in range(1, 65536)}
_SUM = ({"value": float, "seconds": float}, {"problem": str})
_SUMS = ({f"{carrier}?": _SUM for carrier in _CARRIERS}, {"problem": str})


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of the job: its task, its `host:port`, and what it has found on its host.

    Attributes:
        task: its job and index.
        address: its `host:port`.
        host: the name of its host.
        cores: how many cores it may use.
        gpus: how many GPUs it sees.
        versions: by name.
        public: addresses of its host at which anyone in the Internet could reach it.
    """

    task: str
    address: str
    host: str
    cores: int
    gpus: int
    versions: dict[str, str]
    public: Sequence[str] = ()


def check(timeout: float, with_tensorflow: bool) -> int:
    """Meets the other processes and tries the network between them; rank 0 prints the result.

    Args:
        timeout: how long to wait for the others, each time, in seconds.
        with_tensorflow: whether to let TensorFlow sum something up, too, for which it has its own time.

    Returns:
        The exit code: 0 if the processes can train together.
    """
    try:
        found = find()
        if isinstance(found, ClusterConfig) and found.is_single_process:
            preflight.require(found)
            for note in exposed({host_name(os.environ): public_addresses()}):
                print(f"warning: {note}")
            print(f"ready: one process ({found.source}). For several, start this as the training: `srun tfdist check`")
            return 0
        # First of all: a process that fails later has said which rank it is.
        _say(str(found))
        config = discover(timeout=timeout)
        preflight.require(config)
        return _check(config, timeout, with_tensorflow and "ps" not in config.jobs)
    except ClusterError as error:
        for problem in error.problems:
            _say(f"not ready: {problem}")
        return 1


def _check(config: ClusterConfig, timeout: float, with_tensorflow: bool) -> int:
    """The exit code: 0 if the processes are ready to train. All of them hear the same, and rank 0 prints it."""
    servers = "ps" in config.jobs
    tasks = tasks_of(config, servers)
    rank, names = tasks.index((config.task_type, config.task_index)), [f"{job} {index}" for job, index in tasks]

    def tell(topic: str, own: dict, schema: Any, more: float = 0.0, most: int = _LONGEST_TEXT) -> list[Any]:
        """What all processes tell about a topic, by rank, once all have come to it."""
        told = meet(config, timeout + more, own, servers, topic=f"check, {topic}")
        return [read_answer(told[other], schema, topic, name, most) for other, name in enumerate(names)]

    own = Member(names[rank], str(config.address), host_name(os.environ), len(usable_cores()),
                 len(visible_gpus(os.environ)), versions(), [*public_addresses()])  # fmt: skip
    low, high = port_range(os.environ)
    with ports.reserve(1, low=low, high=high) as reservation, _listening(reservation.ports[0]):
        met = tell(
            "introduction",
            {"member": dataclasses.asdict(own), "port": reservation.ports[0]},
            _INTRODUCTION,
            most=_LONGEST_NAME,
        )
        # Task and address are those of the cluster, which is the same for all.
        members = [
            Member(**{**one["member"], "task": name, "address": config.jobs[job][index]})
            for one, name, (job, index) in zip(met, names, tasks, strict=True)
        ]
        ways = _ways(rank, members, [one["port"] for one in met])
        answers = tell("ways", {"ways": ways, "sums": with_tensorflow}, _ways_schema(len(names)), _WAYS_SECONDS)
    found = [{int(other): way for other, way in one["ways"].items()} for one in answers]
    show = print if rank == 0 else lambda text: None
    show(members_table(members))
    show(ways_table(members, found))
    problems = differing_versions(members) + _blocked(members, found)
    # TensorFlow would wait in vain for those that it cannot reach.
    if not problems and answers[0]["sums"]:
        problems, seconds = _wrong_sums(members, tell("sum", _sums(config), _SUMS, _SUM_SECONDS))
        if not problems:
            for carrier, slowest in seconds.items():
                show(f"{carrier}: the right sum everywhere; {slowest * 1e3:.1f} ms for 4 MiB")
    for note in exposed({member.host: member.public for member in members}):
        show(f"warning: {note}")
    for problem in problems[1:]:
        show(f"also: {problem}")
    show(f"not ready: {problems[0]}" if problems else "ready")
    return int(bool(problems))


def _say(text: str) -> None:
    print(f"tfdist: {text}", file=sys.stderr, flush=True)


def exposed(hosts: Mapping[str, Sequence[str]]) -> list[str]:
    """A line for each host with public addresses: TensorFlow checks nobody who connects.

    Example:
        >>> exposed({"node-1": ["8.8.8.8"], "node-2": []})[0].partition(":")[0]
        'node-1 has the public address 8.8.8.8'
    """
    return [
        f"{host} has the public address {', '.join(addresses)}: TensorFlow listens on all addresses and asks nobody "
        "for a password, so whoever reaches its ports can read and change the training, and run code. Expected: a "
        "firewall that keeps others from ports 20000 to 32767, or those of TFDIST_PORTS; or, for `tfdist run`, a "
        "network of its own: unshare --net --map-root-user sh -c 'ip link set lo up; exec tfdist run ...'"
        for host, addresses in hosts.items()
        if addresses
    ]


def differing_versions(members: Sequence[Member]) -> list[str]:
    """A line for each version that is not the same everywhere.

    Example:
        >>> one = Member("worker 0", "a:1", "a", 4, 0, {"tensorflow": "2.21.0"})
        >>> other = dataclasses.replace(one, task="worker 1", versions={"tensorflow": "2.20.0"})
        >>> differing_versions([one, other])[0].partition(".")[0]
        'tensorflow is 2'
    """
    problems = []
    for name in COMPARED:
        ranks: dict[str, list[str]] = {}
        for member in members:
            ranks.setdefault(member.versions.get(name, "not installed"), []).append(member.task)
        if len(ranks) > 1:
            listing = ", ".join(f"{version} on {', '.join(tasks[:8])}" for version, tasks in ranks.items())
            problems.append(f"{name} is {listing}. Expected: the same everywhere; install it on those that differ")
    return problems


def read_answer(found: Any, schema: Any, topic: str, task: str, most: int = _LONGEST_TEXT) -> Any:
    """What another process has answered, once it fits a schema; its texts are fit to be printed, and cut where long.

    The process has proved that it belongs here, but may be of another version, or broken.

    Raises:
        ClusterError: it does not fit.

    Example:
        >>> read_answer({"host": "node-1\\x1b[2J"}, {"host": str}, "introduction", "worker 1")
        {'host': 'node-1\\\\x1b[2J'}
    """
    try:
        json_schema.check(found, schema)
    except ValueError as error:
        raise ClusterError(
            f"Received: the {topic} of {task}: {error}. Expected: what this version of tfdist tells; install the same "
            "one there, and see what it has printed"
        ) from None
    return _printable(found, most)


def _printable(value: Any, most: int) -> Any:
    if isinstance(value, dict):
        return {name: _printable(one, most) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(one, most) for one in value[:most]]
    return cleaned(value, most) if isinstance(value, str) else value


# --- The ways between the processes -----------------------------------------------------------------------------------


def _listening(port: int) -> socket.socket:
    """Lets others connect to a port that this process has reserved. The kernel answers them: nobody has to accept."""
    listener = sockets.bind_everywhere(port, reuse=True)
    # Room for far more than the tries of all that connect.
    listener.listen(socket.SOMAXCONN)
    return listener


def _ways(rank: int, members: Sequence[Member], listening: Sequence[int]) -> dict[str, Any]:
    """By rank, how many seconds a connection to another process takes, or why there is none."""
    chosen = connecting([member.host for member in members])
    others = [other for other in chosen if other != rank] if rank in chosen else []

    def way(other: int) -> Any:
        place = sockets.split_address(members[other].address)[0], listening[other]
        taken = []
        try:
            for _ in range(_TRIES):
                started = time.perf_counter()
                socket.create_connection(place, _CONNECT_SECONDS).close()
                taken.append(time.perf_counter() - started)
        except OSError as error:
            return sockets.reason_of(error)
        return min(taken)

    with ThreadPoolExecutor(max_workers=max(1, len(others))) as pool:
        # At once: a host that is cut off does not answer at all.
        return dict(zip(map(str, others), pool.map(way, others), strict=True))


def _ways_schema(size: int) -> dict[str, Any]:
    return {"ways": {f"{rank}?": (float, str) for rank in range(size)}, "sums": bool}


def connecting(hosts: Sequence[str]) -> list[int]:
    """The ranks that connect to each other: all of a small job, one of each host in a larger one.

    Example:
        >>> connecting(["a", "a", "b"])
        [0, 1, 2]
        >>> len(connecting([f"host-{rank // 8}" for rank in range(1024)]))
        16
    """
    if len(hosts) <= _CONNECTING:
        return list(range(len(hosts)))
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())[:_CONNECTING]


def _blocked(members: Sequence[Member], found: Sequence[Mapping[int, Any]]) -> list[str]:
    """A line for each way that is not open."""
    return [
        f"{members[rank].task} on {members[rank].host} does not reach {members[other].task} on {members[other].host} "
        f"({sockets.split_address(members[other].address)[0]}): {way}. Expected: all ports of all hosts are open to "
        "each other, or those of TFDIST_PORTS; TFDIST_INTERFACE chooses another network"
        for rank, ways in enumerate(found)
        for other, way in ways.items()
        if isinstance(way, str)
    ]


# --- What TensorFlow sums up ------------------------------------------------------------------------------------------


def _sums(config: ClusterConfig) -> dict[str, Any]:
    """What the sums by each transport are here, or why there are none. A process of its own computes them."""
    config_of_it = config.to_json()
    level = os.environ.get(LOG_LEVEL)
    # The user's own choice shows what TensorFlow prints; `tfdist run` makes one for all that it starts.
    shows = level is not None and not ("TFDIST_RUN_ID" in os.environ and level == QUIET)
    env = {**os.environ, "TF_CONFIG": config_of_it, "TFDIST_CLUSTER": config_of_it, LOG_LEVEL: level if shows else "3"}
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "tfdist.launcher.check"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=None if shows else subprocess.PIPE,
            text=True,
            timeout=_SUM_SECONDS,
            preexec_fn=die_with_parent(os.getpid()),
        )
    except subprocess.TimeoutExpired as error:
        if "started" in str(error.stdout):
            return {"problem": f"it has not ended within {_SUM_SECONDS:g} s"}
        return {
            "problem": f"TensorFlow was still starting after {_SUM_SECONDS:g} s (a slow file system? few cores?). "
            "Start the check once more, or leave the sum out by --no-tensorflow"
        }
    lines = ended.stdout.splitlines()
    if ended.returncode == 0 and lines:
        return json.loads(lines[-1])
    last = (ended.stderr or "").splitlines()[-_LAST_LINES:]
    print(*last, sep="\n", file=sys.stderr, flush=True)
    return {"problem": last[-1] if last else f"exit code {ended.returncode}"}


def _sum_up() -> None:
    """What that process does: the sum of 1, 2, ... over the ranks, and the seconds that one of 4 MiB takes."""
    import tensorflow as tf

    print("started", flush=True)  # it takes long on a slow file system, which is not the sum's fault

    from tfdist.runtime.job import joined

    cluster = discover()
    found: dict[str, Any] = {TENSORFLOW: _timed_sum(cluster, _SUM_SECONDS, TENSORFLOW)}
    # GPUs exchange by NCCL, which is TensorFlow's, unless they are shared.
    if not tf.config.get_visible_devices("GPU") or joined().shares_gpus:
        try:
            found[DIRECT] = _timed_sum(cluster, _DIRECT_SECONDS, DIRECT)
        except Exception as error:  # whatever it is, the other one's sum is told as well
            found[DIRECT] = {"problem": f"{type(error).__name__}: {error}"[:_LONGEST_TEXT]}
    print(json.dumps(found), flush=True)


def _timed_sum(cluster: ClusterConfig, timeout: float, transport: str) -> dict[str, float]:
    import tensorflow as tf

    from tfdist.strategies.multi_worker import MultiWorkerMirroredStrategy

    strategy = MultiWorkerMirroredStrategy(cluster=cluster, start_timeout=timeout, transport=transport)

    def summed(value: tf.Tensor) -> tf.Tensor:
        # tf.identity copies it to the replica's device, where the gradients of a training step are, too.
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(value))

    @tf.function
    def total(value: tf.Tensor) -> tf.Tensor:
        return strategy.run(summed, args=(value,))

    def first(value: tf.Tensor) -> float:
        return float(tf.reshape(strategy.experimental_local_results(total(value))[0], [-1])[0])

    # The replicas of a process share its number: each adds an equal part of it.
    own = len(strategy.experimental_local_results(strategy.run(lambda: tf.constant(0.0))))
    block = tf.ones([_BYTES // 4])
    first(block)
    started = time.perf_counter()
    first(block)
    seconds = time.perf_counter() - started
    return {"value": first(tf.constant([(cluster.rank + 1.0) / own])), "seconds": seconds}


def _wrong_sums(members: Sequence[Member], answers: Sequence[Mapping[str, Any]]) -> tuple[list[str], dict[str, float]]:
    """A line for each sum that is wrong, and the seconds of the slowest process by each transport."""
    expected = len(members) * (len(members) + 1) / 2
    problems: list[str] = []
    slowest: dict[str, float] = {}
    for member, found in zip(members, answers, strict=True):
        for transport, one in {TENSORFLOW: found}.items() if "problem" in found else found.items():
            carrier = _CARRIERS[transport]
            if "problem" in one:
                problems.append(f"{carrier} failed in {member.task}: {one['problem']}")
            elif one["value"] != expected:
                problems.append(
                    f"{carrier} gave {one['value']:g} in {member.task}. Expected: {expected:g}, the sum of 1 to "
                    f"{len(members)}"
                )
            else:
                slowest[carrier] = max(slowest.get(carrier, 0.0), one["seconds"])
    return problems, slowest


# --- Tables -----------------------------------------------------------------------------------------------------------


def members_table(members: Sequence[Member]) -> str:
    """The table of the processes, one line each."""
    rows = [
        [str(rank), one.task, one.host, one.address, str(one.cores), str(one.gpus)]
        + [one.versions.get(name, "-") for name in COMPARED]
        for rank, one in enumerate(members)
    ]
    return _aligned([["rank", "task", "host", "address", "cores", "GPUs", *COMPARED], *rows])


def ways_table(members: Sequence[Member], found: Sequence[Mapping[int, Any]]) -> str:
    """How long a connection takes from each process that connected (lines) to each other (columns), or the slowest.

    Args:
        members: all processes.
        found: for each of them, the seconds by the other's rank, or why there is no connection.

    Example:
        >>> members = [Member("worker 0", "a:1", "a", 1, 0, {}), Member("worker 1", "b:1", "b", 1, 0, {})]
        >>> print(ways_table(members, [{1: 0.0001}, {0: "refused"}]).splitlines()[-1])
        1 b        blocked  -
    """
    connected = [rank for rank, ways in enumerate(found) if ways]
    if not connected:
        return ""
    if len(connected) <= _SHOWN:
        names = {rank: f"{rank} {members[rank].host}" for rank in connected}
        rows = [[name, *(_shown(found[rank].get(other)) for other in connected)] for rank, name in names.items()]
        return "\n" + _aligned([["from \\ to", *names.values()], *rows])
    open_ways = [
        (way, rank, other) for rank in connected for other, way in found[rank].items() if isinstance(way, float)
    ]
    if not open_ways:
        return "\nno way is open"
    seconds, rank, other = max(open_ways)
    return (
        f"\n{len(open_ways)} ways are open, between {len(connected)} processes; the slowest takes {_shown(seconds)}, "
        f"from rank {rank} on {members[rank].host} to rank {other} on {members[other].host}"
    )


def _shown(way: float | str | None) -> str:
    if way is None:
        return "-"
    return "blocked" if isinstance(way, str) else f"{way * 1e6:.0f} us"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


if __name__ == "__main__":
    _sum_up()
    sys.stdout.flush()
    # Past TensorFlow's exit handlers, which wait for peers that may be gone.
    os._exit(0)
