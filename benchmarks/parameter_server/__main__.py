"""Measures parameter servers and their peers in turns and prints the tables."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.data_parallel import machine
from benchmarks.data_parallel.processes import TrialError
from benchmarks.data_parallel.table import fill, machine_line
from benchmarks.parameter_server import tables
from benchmarks.parameter_server.arguments import parse
from benchmarks.parameter_server.clusters import Setting
from benchmarks.parameter_server.measuring import measure, name_of, say
from benchmarks.parameter_server.trials import PEERS, trials_of
from benchmarks.process_files import busy_cores

README = Path(__file__).with_name("README.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a trial failed."""
    options = parse(arguments)
    # As KeyboardInterrupt does: unwinds, so that all processes are ended.
    signal.signal(signal.SIGTERM, _leave)
    peers = list(PEERS)
    if reason := why_without_tf_keras(options.tf_keras_python):
        peers.remove("tf_keras")
        say(reason)
    facts = {**machine.describe(options.cores), "busy_before": busy_cores()}
    setting = Setting(
        options.cores, options.deadline, {**dict.fromkeys(PEERS, sys.executable), "tf_keras": options.tf_keras_python}
    )
    trials = {part: trials_of(part, peers, options.quick) for part in options.only}
    try:
        # A trial that is in two parts is measured once.
        all_trials = list(dict.fromkeys(trial for of_part in trials.values() for trial in of_part))
        samples, errors = measure(all_trials, options.repeats, options.seconds, setting)
    except TrialError as error:
        say(str(error))
        return 1
    terms = (
        f"Medians of {options.repeats} samples of about {options.seconds:g} s; in brackets the lowest and the highest. "
        f"Cores that other programs kept busy before: {facts['busy_before']:.2f}."
    )
    text = tables.report({part: (of_part, samples) for part, of_part in trials.items()})
    text = f"{text}\n\n{machine_line(facts, terms)}"
    print(text)
    if options.out:
        records = [
            {**trial.to_dict(), "samples": samples.get(trial, []), "error": errors.get(trial)} for trial in all_trials
        ]
        options.out.write_text(json.dumps({"machine": facts, "trials": records}, indent=1) + "\n")
    if options.write_readme:
        README.write_text(fill(README.read_text(), text))
    for trial in errors:
        say(f"failed: {name_of(trial)}")
    return 1 if errors else 0


def why_without_tf_keras(python: str) -> str | None:
    """Why the stock strategy cannot be measured with an interpreter; `None` if it can."""
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tf_keras') is None)"
    try:
        found = subprocess.run([python, "-c", look], timeout=60, check=False).returncode == 0
    except OSError:
        found = False
    if found:
        return None
    return (
        f"{PEERS['tf_keras']} is left out: {python} has no tf_keras. Install it by `pip install tf_keras`, or name "
        "another interpreter by --tf-keras-python."
    )


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
