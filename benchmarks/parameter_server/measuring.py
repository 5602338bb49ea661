"""Has all trials of a part measured, in turns."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.asking import Answering, answering
from benchmarks.children import Children, make_environ
from benchmarks.data_parallel.peers import installed
from benchmarks.data_parallel.processes import Command, TrialError, say
from benchmarks.parameter_server.trials import PEERS, Trial, by_case, trials_of
from tfdist.cluster.ports import reserve

# Seconds that a sample takes.
_SECONDS, _SECONDS_IF_QUICK = 1.0, 0.2

Samples = dict[Trial, list[dict]]
_THREADS = {
    # What `tfdist run` gives to processes that serve, and the tutorial of TensorFlow's strategy to all.
    "TF_NUM_INTEROP_THREADS": "4",
    "GRPC_FAIL_FAST": "use_caller",
}


def of(part: str) -> Callable[[Children, int, bool], list[dict]]:
    """What measures a part: one record for each trial, with its samples or with what went wrong.

    Each is measured as often as the others, in turns; all clusters are there from the beginning to the end.
    """

    def measure(children: Children, samples: int, quick: bool) -> list[dict]:
        peers = [peer for peer in PEERS if peer != "tf_keras" or installed(peer)]
        if len(peers) < len(PEERS):
            say(f"{PEERS['tf_keras']} is left out: install it by `pip install tf_keras`.")
        trials = trials_of(part, peers, quick)
        found: Samples = {}
        errors: dict[Trial, str] = {}
        rounds, seconds = (min(samples, 2), _SECONDS_IF_QUICK) if quick else (samples, _SECONDS)
        with contextlib.ExitStack() as stack:
            clusters = {}
            for peer, workers in dict.fromkeys(trial.cluster for trial in trials):
                say(f"starting {peer} with {workers} workers ...")
                clusters[peer, workers] = stack.enter_context(started(peer, workers, children))
            for of_case in by_case(trials):
                say(f"{of_case[0].case.title} ...")
                _measure_case(of_case, rounds, seconds, clusters, found, errors)
        return [
            {"trial": trial.to_dict(), "samples": found.get(trial, []), "error": errors.get(trial)} for trial in trials
        ]

    return measure


def _measure_case(
    trials: Sequence[Trial],
    repeats: int,
    seconds: float,
    clusters: Mapping[tuple, Answering],
    samples: Samples,
    errors: dict[Trial, str],
) -> None:
    def attempt(trial: Trial, action: Callable[[Answering], None]) -> None:
        if trial in errors:
            return
        try:
            action(clusters[trial.cluster])
        except TrialError as error:
            errors[trial] = str(error)
            say(f"  {name_of(trial)} failed: {error}")

    for trial in trials:
        attempt(trial, lambda cluster, trial=trial: cluster.ask("prepare", trial=trial.to_dict(), seconds=seconds))
    for number in range(repeats):
        for trial in trials:

            def sample(cluster: Answering, trial: Trial = trial) -> None:
                samples.setdefault(trial, []).append(cluster.ask("measure", trial=trial.to_dict()))

            attempt(trial, sample)
        say(f"  {number + 1} of {repeats}")
    for cluster in {trial.cluster: clusters[trial.cluster] for trial in trials}.values():
        with contextlib.suppress(TrialError, OSError):
            cluster.ask("forget")


def name_of(trial: Trial) -> str:
    """Framework, options and number of workers, for messages."""
    return f"{trial.title}{f', {trial.workers} workers' if trial.workers else ''}"


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
