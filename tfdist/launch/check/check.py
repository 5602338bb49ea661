"""What `tfdist check` does, in each of the processes that it is started as."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence

from tfdist.cluster import address, preflight
from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover, find
from tfdist.cluster.errors import ClusterError
from tfdist.launch.check.assembly import Assembly, assembled
from tfdist.launch.check.held_back import held_back
from tfdist.launch.check.member import Member, differing_versions
from tfdist.launch.check.network import EchoServer, Link, measure, partners
from tfdist.launch.check.tables import links_table, members_table
from tfdist.launch.plan import LOG_LEVEL, QUIET

# Of larger jobs, one process of each host measures, on so many hosts.
_MEASURED = 16
_SUM = "tfdist-check-sum"
# To start TensorFlow, which reads some gigabytes, on all hosts, and to let it sum up.
_SUM_SECONDS = 180.0


def check(timeout: float, with_tensorflow: bool) -> int:
    """Meets the other processes, measures, and prints what rank 0 has found out about all.

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
            print(f"ready: one process ({found.source}). For several, start this as the training: `srun tfdist check`")
            return 0
        # Which rank it is, the one with the first word may not live to tell.
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
    """What rank 0 has said: whether all are ready."""
    echo = EchoServer(assembly.token, assembly.measuring[assembly.rank])
    links = _links(assembly)
    assembly.tell("links", json.dumps({other: dataclasses.asdict(link) for other, link in links.items()}))
    problems: list[str] = []
    if assembly.rank == 0:
        print(members_table(assembly.members))
        found = [_read_links(text) for text in assembly.hear_all("links")]
        print(links_table(assembly.members, found), flush=True)
        problems = differing_versions(assembly.members) + _blocked(assembly.members, found)
        # TensorFlow would wait in vain for those that it cannot reach.
        assembly.tell("go", json.dumps(with_tensorflow and not problems))
    go = json.loads(assembly.hear("go", 0))
    echo.close()  # all have measured
    if go:
        assembly.tell("sum", _sum(config, assembly))
        if assembly.rank == 0:
            problems += _wrong_sums(assembly)
    if assembly.rank == 0:
        for problem in problems[1:]:
            print(f"also: {problem}")
        print(f"not ready: {problems[0]}" if problems else "ready", flush=True)
        assembly.tell("code", str(int(bool(problems))))
    return int(assembly.hear("code", 0, more=2 * _SUM_SECONDS if go else 0.0))


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
    """Measures the way to the others, once all of them listen."""
    assembly.tell("listening", "yes")
    if assembly.rank == 0:
        assembly.hear_all("listening")
        assembly.tell("start", "yes")
    assembly.hear("start", 0)
    links: dict[int, Link] = {}
    chosen = _chosen([member.host for member in assembly.members])
    if assembly.rank in chosen:
        others = [chosen[other] for other in partners(chosen.index(assembly.rank), len(chosen))]
        hosts = [address.split(assembly.members[other].address)[0] for other in others]
        places = [(host, assembly.measuring[other]) for host, other in zip(hosts, others, strict=True)]
        links = dict(zip(others, measure(places, assembly.token), strict=True))
    return links


def _chosen(hosts: Sequence[str]) -> list[int]:
    """Which processes measure.

    Example:
        >>> _chosen(["a", "a", "b"])
        [0, 1, 2]
        >>> len(_chosen([f"host-{rank // 8}" for rank in range(1024)]))
        16
    """
    if len(hosts) <= _MEASURED:
        return list(range(len(hosts)))
    return sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())[:_MEASURED]


def _read_links(text: str) -> dict[int, Link]:
    return {int(other): Link(**link) for other, link in json.loads(text).items()}


def _blocked(members: Sequence[Member], found: Sequence[dict[int, Link]]) -> list[str]:
    """A line for each way that is not open."""
    problems = []
    for rank, links in enumerate(found):
        for other, link in links.items():
            if link.problem is not None:
                one, to = members[rank], members[other]
                problems.append(
                    f"{one.task} on {one.host} does not reach {to.task} on {to.host} "
                    f"({address.split(to.address)[0]}): {link.problem}. Expected: all ports of all hosts are open to "
                    "each other, or those of TFDIST_PORTS; TFDIST_INTERFACE chooses another network"
                )
    return problems


def _sum(config: ClusterConfig, assembly: Assembly) -> str:
    """What TensorFlow's all-reduce returns here, or why it does not, as JSON."""
    found: list[dict] = []
    started = threading.Event()

    def sum_up() -> None:
        from tfdist.launch.check.all_reduce import all_reduce

        try:
            import tensorflow  # noqa: F401 - all of the time that this takes is none of the sum's

            started.set()
            value, seconds = all_reduce(config, _SUM_SECONDS)
            found.append({"value": value, "seconds": seconds})
        except Exception as error:  # whatever it is, it is to be told
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
    return json.dumps(found[0] if found else {"problem": unfinished})


def _wrong_sums(assembly: Assembly) -> list[str]:
    expected = len(assembly.members) * (len(assembly.members) + 1) / 2
    problems, slowest = [], 0.0
    for rank, text in enumerate(assembly.hear_all("sum", more=_SUM_SECONDS)):
        found = json.loads(text)
        if "problem" in found:
            problems.append(f"TensorFlow's all-reduce failed in {assembly.members[rank].task}: {found['problem']}")
        elif found["value"] != expected:
            problems.append(
                f"TensorFlow's all-reduce gave {found['value']:g} in {assembly.members[rank].task}. Expected: "
                f"{expected:g}, the sum of 1 to {len(assembly.members)}"
            )
        else:
            slowest = max(slowest, found["seconds"])
    if not problems:
        print(f"TensorFlow's all-reduce: the right sum everywhere; {slowest * 1e3:.1f} ms for 4 MiB", flush=True)
    return problems


def _say(text: str) -> None:
    print(f"tfdist: {text}", file=sys.stderr, flush=True)
