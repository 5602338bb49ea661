"""Has all trials of a part measured, in turns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

from benchmarks.asking import Answering
from benchmarks.children import Children
from benchmarks.data_parallel.peers import installed
from benchmarks.data_parallel.processes import TrialError, say
from benchmarks.parameter_server.clusters import started
from benchmarks.parameter_server.trials import PEERS, Trial, by_case, trials_of

# Seconds that a sample takes.
_SECONDS, _SECONDS_IF_QUICK = 1.0, 0.2

Samples = dict[Trial, list[dict]]


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
