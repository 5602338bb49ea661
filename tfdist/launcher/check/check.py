"""What each process of `tfdist check` does."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from tfdist.cluster import preflight, sockets
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover, find
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.rendezvous.endpoints import host_name
from tfdist.cluster.variables import DIRECT, TENSORFLOW
from tfdist.launcher.check.answers import Answer
from tfdist.launcher.check.assembly import COMPARED, Assembly, Member, assembled, differing_versions, exposed
from tfdist.launcher.check.network import EchoServer, Link, measure, partners
from tfdist.launcher.machine import public_addresses
from tfdist.launcher.run_plan import LOG_LEVEL, QUIET

# Of larger jobs, one process of each host measures, on so many hosts.
_MEASURED = 16
_SUM = "tfdist-check-sum"
# Starting TensorFlow reads some gigabytes on every host; then comes the sum.
_SUM_SECONDS = 180.0
# Of these, what the second sum has to connect: all processes are there, with TensorFlow loaded.
_DIRECT_SECONDS = 30.0
_STANDARD_ERROR = 2
_BYTES = 4 << 20
_CARRIERS = {TENSORFLOW: "TensorFlow's all-reduce", DIRECT: "tfdist's own transport"}
# A table of all pairs that still fits on a screen.
_MATRIX = 8
_LONGEST = 5000  # of what TensorFlow says in another process
_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))


def check(timeout: float, with_tensorflow: bool) -> int:
    """Meets the other processes and measures the network between them; rank 0 prints the result.

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
        with assembled(config, timeout) as assembly:
            code = _check(config, assembly, with_tensorflow and "ps" not in config.jobs)
        if any(thread.name == _SUM for thread in threading.enumerate()):
            sys.stdout.flush()
            os._exit(code)  # it waits inside of TensorFlow, which would wait for it
        return code
    except ClusterError as error:
        for problem in error.problems:
            _say(f"not ready: {problem}")
        return 1


def _check(config: ClusterConfig, assembly: Assembly, with_tensorflow: bool) -> int:
    """The exit code, which rank 0 tells all processes: 0 if they are ready to train."""
    echo = EchoServer(assembly.token, assembly.measuring[assembly.rank])
    links = _links(assembly)
    assembly.publish("links", {str(other): dataclasses.asdict(link) for other, link in links.items()})
    problems: list[str] = []
    if assembly.rank == 0:
        print(members_table(assembly.members))
        found = [_read_links(answer, len(assembly.members)) for answer in assembly.receive_all("links")]
        print(links_table(assembly.members, found), flush=True)
        problems = differing_versions(assembly.members) + _blocked(assembly.members, found)
        # TensorFlow would wait in vain for those that it cannot reach.
        assembly.publish("decision", {"go": with_tensorflow and not problems})
    go = assembly.receive("decision", 0).truth("go")
    echo.close()  # all have measured
    if go:
        assembly.publish("sum", _sum(config))
        if assembly.rank == 0:
            problems += _wrong_sums(assembly)
    if assembly.rank == 0:
        for note in exposed({member.host: member.public for member in assembly.members}):
            print(f"warning: {note}")
        for problem in problems[1:]:
            print(f"also: {problem}")
        print(f"not ready: {problems[0]}" if problems else "ready", flush=True)
        assembly.publish("result", {"ready": not problems})
    return int(not assembly.receive("result", 0, more=2 * _SUM_SECONDS if go else 0.0).truth("ready"))


def _wants_output(env: Mapping[str, str]) -> bool:
    """Whether the user has said what TensorFlow is to print; `tfdist run` says it to all that it starts.

    Example:
        >>> _wants_output({"TF_CPP_MIN_LOG_LEVEL": "0"}), _wants_output({})
        (True, False)
        >>> _wants_output({"TF_CPP_MIN_LOG_LEVEL": "2", "TFDIST_RUN_ID": "1"})
        False
    """
    return LOG_LEVEL in env and not ("TFDIST_RUN_ID" in env and env[LOG_LEVEL] == QUIET)


def _links(assembly: Assembly) -> dict[int, Link]:
    """Measures the network to the other processes, once all of them listen."""
    assembly.publish("listening", {})
    if assembly.rank == 0:
        assembly.receive_all("listening")
        assembly.publish("start", {})
    assembly.receive("start", 0)
    links: dict[int, Link] = {}
    chosen = _chosen([member.host for member in assembly.members])
    if assembly.rank in chosen:
        others = [chosen[other] for other in partners(chosen.index(assembly.rank), len(chosen))]
        hosts = [sockets.split_address(assembly.members[other].address)[0] for other in others]
        places = [(host, assembly.measuring[other]) for host, other in zip(hosts, others, strict=True)]
        links = dict(zip(others, measure(places, assembly.token), strict=True))
    return links


def _chosen(hosts: Sequence[str]) -> list[int]:
    """The ranks that measure: all of a small job, one of each host in a larger one.

    Example:
        >>> _chosen(["a", "a", "b"])
        [0, 1, 2]
        >>> len(_chosen([f"host-{rank // 8}" for rank in range(1024)]))
        16
    """
    if len(hosts) <= _MEASURED:
        return list(range(len(hosts)))
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())[:_MEASURED]


def _read_links(answer: Answer, size: int) -> dict[int, Link]:
    return {int(other): Link.read(answer.part(other)) for other in answer.names(set(map(str, range(size))))}


def _blocked(members: Sequence[Member], found: Sequence[dict[int, Link]]) -> list[str]:
    """A line for each way that is not open."""
    problems = []
    for rank, links in enumerate(found):
        for other, link in links.items():
            if link.problem is not None:
                one, to = members[rank], members[other]
                problems.append(
                    f"{one.task} on {one.host} does not reach {to.task} on {to.host} "
                    f"({sockets.split_address(to.address)[0]}): {link.problem}. Expected: all ports of all hosts are "
                    "open to each other, or those of TFDIST_PORTS; TFDIST_INTERFACE chooses another network"
                )
    return problems


def _sum(config: ClusterConfig) -> dict:
    """What the sums by each transport are here, or why there are none."""
    found: list[dict] = []
    started = threading.Event()

    def sum_up() -> None:
        try:
            import tensorflow  # noqa: F401 - takes long on a slow file system, which is not the sum's fault

            started.set()
            found.append(all_reduce(config, _SUM_SECONDS))
        except Exception as error:  # whatever it is, rank 0 prints it
            found.append({"problem": f"{type(error).__name__}: {error}"})

    thread = threading.Thread(target=sum_up, name=_SUM, daemon=True)
    if _wants_output(os.environ):
        thread.start()
        thread.join(_SUM_SECONDS)
    else:
        # TensorFlow greets every process with some twenty lines, part of them before it knows any level.
        os.environ[LOG_LEVEL] = "3"
        with held_back() as file:
            thread.start()
            thread.join(_SUM_SECONDS)
            file.seek(0)
            text = file.read()
        if not found or "problem" in found[0]:
            os.write(2, text)
    unfinished = (
        f"it has not ended within {_SUM_SECONDS:g} s"
        if started.is_set()
        else f"TensorFlow was still starting after {_SUM_SECONDS:g} s (a slow file system? few cores?). Start the "
        "check once more, or leave the sum out by --no-tensorflow"
    )
    return found[0] if found else {"problem": unfinished}


def _wrong_sums(assembly: Assembly) -> list[str]:
    expected = len(assembly.members) * (len(assembly.members) + 1) / 2
    problems: list[str] = []
    slowest: dict[str, float] = {}
    for member, found in zip(assembly.members, assembly.receive_all("sum", more=_SUM_SECONDS), strict=True):
        if "problem" in found:
            problems.append(f"TensorFlow's all-reduce failed in {member.task}: {found.text('problem', _LONGEST)}")
            continue
        for transport in found.names(set(_CARRIERS)):
            one, carrier = found.part(transport), _CARRIERS[transport]
            if "problem" in one:
                problems.append(f"{carrier} failed in {member.task}: {one.text('problem', _LONGEST)}")
                continue
            if (value := one.real("value")) != expected:
                problems.append(
                    f"{carrier} gave {value:g} in {member.task}. Expected: "
                    f"{expected:g}, the sum of 1 to {len(assembly.members)}"
                )
            slowest[carrier] = max(slowest.get(carrier, 0.0), one.real("seconds"))
    if not problems:
        for carrier, seconds in slowest.items():
            print(f"{carrier}: the right sum everywhere; {seconds * 1e3:.1f} ms for 4 MiB", flush=True)
    return problems


def _say(text: str) -> None:
    print(f"tfdist: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def held_back() -> Iterator[BinaryIO]:
    """Sends standard error, that of libraries of C++ as well, to a file that has no name.

    Yields:
        The file.

    Example:
        >>> with held_back() as file:
        ...     os.write(2, b"noise")
        5
    """
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        kept = os.dup(_STANDARD_ERROR)
        os.dup2(file.fileno(), _STANDARD_ERROR)
        try:
            yield file
        finally:
            sys.stderr.flush()
            os.dup2(kept, _STANDARD_ERROR)
            os.close(kept)


def all_reduce(cluster: ClusterConfig, timeout: float) -> dict[str, dict]:
    """By transport, the sum of 1, 2, ... over the ranks, and how many seconds one of 4 MiB takes.

    Raises:
        ClusterError: if the processes do not get together.
    """
    import tensorflow as tf

    from tfdist.runtime.job import joined

    found: dict[str, dict] = {TENSORFLOW: _timed_sum(cluster, timeout, TENSORFLOW)}
    # GPUs exchange by NCCL, which is TensorFlow's, unless they are shared.
    if not tf.config.get_visible_devices("GPU") or joined().shares_gpus:
        try:
            found[DIRECT] = _timed_sum(cluster, _DIRECT_SECONDS, DIRECT)
        except Exception as error:  # whatever it is, the other one's sum is told as well
            found[DIRECT] = {"problem": f"{type(error).__name__}: {error}"}
    return found


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


def members_table(members: Sequence[Member]) -> str:
    """The table of the processes, one line each."""
    rows = [["rank", "task", "host", "address", "cores", "GPUs", *COMPARED]]
    for rank, member in enumerate(members):
        versions = [member.versions.get(name, "-") for name in COMPARED]
        places = [member.task, member.host, member.address, str(member.cores), str(member.gpus)]
        rows.append([str(rank), *places, *versions])
    return _aligned(rows)


def links_table(members: Sequence[Member], found: Sequence[Mapping[int, Link]]) -> str:
    """Latency and bandwidth from each of those that measured (lines) to each other (columns), or the extremes.

    Args:
        members: all processes.
        found: for each of them, what it has measured, by the other's rank.
    """
    measured = [rank for rank, links in enumerate(found) if links]
    if not measured:
        return ""
    if len(measured) <= _MATRIX:
        rows = [["from \\ to", *(f"{rank} {members[rank].host}" for rank in measured)]]
        for rank in measured:
            rows.append([f"{rank} {members[rank].host}", *(_shown(found[rank].get(other)) for other in measured)])
        return "\n" + _aligned(rows)
    open_ways = [
        (link, rank, other) for rank in measured for other, link in found[rank].items() if link.problem is None
    ]
    lines = [f"\n{len(open_ways)} ways measured, between {len(measured)} processes"]
    if open_ways:
        slow = max(open_ways, key=lambda way: way[0].latency or 0.0)
        narrow = min(open_ways, key=lambda way: way[0].bandwidth or 0.0)
        lines.append(f"longest latency: {_between(members, slow)}")
        lines.append(f"lowest bandwidth: {_between(members, narrow)}")
    return "\n".join(lines)


def _between(members: Sequence[Member], way: tuple[Link, int, int]) -> str:
    link, rank, other = way
    return f"{_shown(link)}, from rank {rank} on {members[rank].host} to rank {other} on {members[other].host}"


def _shown(link: Link | None) -> str:
    """A measurement as it stands in the table.

    Example:
        >>> _shown(Link(latency=0.00015, bandwidth=118e6))
        '150 us, 118 MB/s'
    """
    if link is None:
        return "-"
    if link.problem is not None or link.latency is None or link.bandwidth is None:
        return "blocked"
    factor, unit = next((unit for unit in _UNITS if link.bandwidth >= unit[0]), (1.0, "B/s"))
    return f"{link.latency * 1e6:.0f} us, {link.bandwidth / factor:.3g} {unit}"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
