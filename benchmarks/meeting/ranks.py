"""Rank 0 in a process of its own, all others as threads of 16 more; they come at once.

All of them are in a network namespace of their own, whose loopback interface counts their bytes and nobody else's.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import resource
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.children import Children
from benchmarks.data_parallel.processes import say
from benchmarks.markdown import spread, table

CASES = [(kind, size) for kind in ("barrier", "rendezvous") for size in (1000, 2000)]
QUICK = [(kind, 100) for kind in ("barrier", "rendezvous")]
_ISOLATED = "TFDIST_BENCH_ISOLATED"
_TIMEOUT = 250.0
_CROWDS = 16
# As many keys, of such lengths, as the processes of a job tell each other.
_INFO = {
    "same.tensorflow": "2.21.0",
    "same.keras": "3.15.1",
    "same.use of deterministic operations": False,
    "same.number of CPU devices to train on": 1,
    "seed is given": False,
}


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each kind of meeting and number of processes."""
    records = [{"kind": kind, "size": size, "samples": []} for kind, size in (QUICK if quick else CASES)]
    for sample in range(1 if quick else samples):
        for record in records:
            say(f"{record['kind']} of {record['size']}, sample {sample + 1} ...")
            settings = {"kind": record["kind"], "size": record["size"]}
            record["samples"].append(children.python(f"{__package__}.ranks", settings, children.cores))
    return records


def table_of(records: Sequence[Mapping]) -> str:
    """A line for each record: what all took together, and what rank 0 had open at most."""
    header = ["Meeting", "Processes", "Time, s", "Bytes, MB", "Open files of rank 0", "Threads of rank 0"]
    lines = []
    for record in records:
        median = {
            name: f"{statistics.median(sample[name] for sample in record['samples']):.0f}"
            for name in ("files", "threads")
        }
        seconds = spread([sample["seconds"] for sample in record["samples"]], 1)
        bytes_ = spread([sample["bytes"] / 1e6 for sample in record["samples"]], 1)
        lines.append([record["kind"], str(record["size"]), seconds, bytes_, median["files"], median["threads"]])
    return table(header, lines, left=1)


def main(settings: dict) -> dict:
    """Measures one case."""
    if _ISOLATED not in os.environ:
        os.environ[_ISOLATED] = "1"
        again = [sys.executable, *sys.orig_argv[1:]]
        script = 'ip link set lo up && exec "$@"'
        os.execvp("unshare", ["unshare", "--net", "--map-root-user", "sh", "-c", script, "sh", *again])
    # As in a shell. The crowds have as many connections as rank 0.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    size = settings["size"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    first, others = {"barrier": _barrier, "rendezvous": _rendezvous}[settings["kind"]](size)
    fork = multiprocessing.get_context("fork")
    ready, go = fork.Barrier(_CROWDS + 1), fork.Event()
    crowds = [
        fork.Process(target=_crowd, args=(others, range(1 + part, size, _CROWDS), ready, go)) for part in range(_CROWDS)
    ]
    for crowd in crowds:
        crowd.start()
    ready.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    most, done = {"files": 0, "threads": 0}, threading.Event()
    watcher = threading.Thread(target=_watch, args=(most, done), daemon=True)
    before = _bytes()
    watcher.start()
    began = time.perf_counter()
    go.set()
    first()
    for crowd in crowds:
        crowd.join()
    seconds = time.perf_counter() - began
    done.set()
    watcher.join()
    if any(crowd.exitcode for crowd in crowds):
        raise SystemExit("not all have met; see above")
    return {"seconds": seconds, "bytes": _bytes() - before, **most}


def _barrier(size: int) -> tuple[Callable[[], object], Callable[[int], object]]:
    from tfdist.cluster import ClusterConfig
    from tfdist.cluster.meeting import meet

    # Of ports that are below those of outgoing connections, only that of the chief is used.
    config = ClusterConfig({"worker": [f"127.0.0.1:{20000 + rank}" for rank in range(size)]})

    def come(rank: int) -> None:
        own = copy.copy(config)
        object.__setattr__(own, "task_index", rank)  # checked once, above, as each process does for itself
        assert len(meet(own, _TIMEOUT, {**_INFO, "seed": secrets.randbelow(2**31)})) == size

    return lambda: come(0), come


def _rendezvous(size: int) -> tuple[Callable[[], object], Callable[[int], object]]:
    from tfdist.cluster.rendezvous import Registration, attend, listen, receive

    secret = secrets.token_bytes(32)

    def own(rank: int) -> Registration:
        name = f"node-{rank // 8:04}.cluster.example"
        return Registration(rank, size, 20000 + rank, None, "127.0.0.1", name, 1000 + rank, "0,1,2,3")

    def come(rank: int) -> None:
        assert len(attend(own(rank), [("127.0.0.1", 20000)], secret, _TIMEOUT)[0]["addresses"]) == size

    return lambda: receive(own(0), listen(own(0), [20000], secret), _TIMEOUT), come


def _crowd(come: Callable[[int], object], ranks: range, ready: threading.Barrier, go: threading.Event) -> None:
    came: list[int] = []

    def one(rank: int) -> None:
        go.wait()
        come(rank)
        came.append(rank)

    threading.stack_size(256 << 10)
    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    ready.wait()
    for thread in threads:
        thread.join()
    if len(came) != len(ranks):
        raise SystemExit(1)


def _watch(most: dict[str, int], done: threading.Event) -> None:
    while not done.wait(0.02):
        most["files"] = max(most["files"], len(os.listdir("/proc/self/fd")))
        most["threads"] = max(most["threads"], threading.active_count())


def _bytes() -> int:
    (line,) = [line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:")]
    return int(line.split()[1])
