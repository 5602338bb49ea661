"""Has all trials of a part measured, in turns."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence

from benchmarks.asking import Answering
from benchmarks.data_parallel.processes import TrialError
from benchmarks.parameter_server.clusters import Setting, started
from benchmarks.parameter_server.trials import Trial, by_case

Samples = dict[Trial, list[dict]]


def measure(trials: Sequence[Trial], repeats: int, seconds: float, setting: Setting) -> tuple[Samples, dict]:
    """Measures trials, each as often as the others, in turns; all clusters are there from the beginning to the end.

    Args:
        trials: what to measure.
        repeats: how many samples of each trial.
        seconds: that a sample takes.
        setting: where processes run.

    Returns:
        The samples of each trial, and what went wrong: a text for each trial that failed.

    Raises:
        TrialError: if a cluster does not start.
    """
    samples: Samples = {}
    errors: dict[Trial, str] = {}
    with contextlib.ExitStack() as stack:
        clusters = {}
        for peer, workers in dict.fromkeys(trial.cluster for trial in trials):
            say(f"starting {peer} with {workers} workers ...")
            clusters[peer, workers] = stack.enter_context(started(peer, workers, setting))
        for of_case in by_case(trials):
            say(f"{of_case[0].case.title} ...")
            _measure_case(of_case, repeats, seconds, clusters, samples, errors)
    return samples, errors


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


def say(text: str) -> None:
    """Progress; to stderr, as stdout is the tables."""
    print(text, file=sys.stderr, flush=True)
