"""The clusters that are measured. All are there at the same time, so that their trials can take turns."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Iterator, Sequence

from benchmarks.asking import Answering, answering
from benchmarks.children import Children
from benchmarks.data_parallel.processes import Command
from benchmarks.data_parallel.trial import make_environ
from tfdist.cluster.ports import reserve

_THREADS = {
    # What `tfdist run` gives to processes that serve, and the tutorial of TensorFlow's strategy to all.
    "TF_NUM_INTEROP_THREADS": "4",
    "GRPC_FAIL_FAST": "use_caller",
}


@contextlib.contextmanager
def started(peer: str, workers: int, children: Children) -> Iterator[Answering]:
    """Starts a peer's processes, and ends them at the end of the `with` block. The chief answers (`chief.Chief`).

    Raises:
        TrialError: if they do not start.
    """
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(reserve(workers + 2)).ports if workers else []
        commands = functools.partial(make_commands, peer, workers, children.cores, ports)
        cluster = stack.enter_context(answering(commands, children.deadline))
        pids = cluster.processes.pids
        by_job = {"worker": pids[1 : 1 + workers], "ps": pids[1 + workers :]} if workers else {}
        cluster.ask("meet", pids=by_job, ports=list(ports))
        yield cluster


def make_commands(
    peer: str, workers: int, cores: Sequence[int], ports: Sequence[int], address: str
) -> tuple[Command, ...]:
    """The processes of a peer: chief, workers and ps, or a single one.

    Args:
        peer: key of `PEERS`.
        workers: how many; 0 for a single process.
        cores: the first one is for the chief, the ps and the single process, the second one for all workers.
        ports: of chief, workers and ps, in this order.
        address: of the socket for requests.
    """
    module = f"{__package__}.{'tf_keras_process' if peer == 'tf_keras' else 'keras_process'}"
    words = (sys.executable, "-m", module, address)
    first, second = cores
    if not workers:
        return (Command(words, make_environ(os.environ, _THREADS), (first,)),)
    jobs = {"chief": ports[:1], "worker": ports[1 : 1 + workers], "ps": ports[1 + workers :]}
    cluster = {job: [f"127.0.0.1:{port}" for port in own] for job, own in jobs.items()}
    return tuple(
        Command(words, make_environ(os.environ, {**_THREADS, "TF_CONFIG": json.dumps(config)}), (core,))
        for job, core in (("chief", first), ("worker", second), ("ps", first))
        for index in range(len(jobs[job]))
        for config in [{"cluster": cluster, "task": {"type": job, "index": index}}]
    )
