"""Measures what backups cost and how soon a failed training goes on, and prints the tables."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks.checkpointing import recovery_trial, table
from benchmarks.checkpointing.arguments import parse
from benchmarks.checkpointing.launchers import HANG_TIMEOUT, LAUNCHERS
from benchmarks.checkpointing.recovery import SAVE_EVERY
from benchmarks.checkpointing.saving import Sample, Saving
from benchmarks.checkpointing.training import BATCH, MODEL, state_bytes
from benchmarks.data_parallel import machine
from benchmarks.data_parallel.models import count_parameters
from benchmarks.data_parallel.peers import installed
from benchmarks.data_parallel.processes import Command, TrialError, run_together
from benchmarks.data_parallel.table import fill, machine_line
from benchmarks.data_parallel.trial import Setting, make_environ

README = Path(__file__).with_name("README.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a trial failed."""
    options = parse(arguments)
    # As KeyboardInterrupt does: unwinds, so that the processes of the trial are ended.
    signal.signal(signal.SIGTERM, _leave)
    facts = machine.describe(options.cores)
    setting = Setting(options.cores, options.deadline, make_environ(os.environ, {}))
    names = [name for name in options.launchers if installed(LAUNCHERS[name].package)]
    for name in set(options.launchers).difference(names):
        package = LAUNCHERS[name].package
        _say(f"{LAUNCHERS[name].title} is left out: {package} is not installed. Install it by `pip install {package}`.")
    samples = measure_overhead(options.rounds, setting) if options.rounds else []
    schedule = recovery_trial.Schedule(options.repeats, options.settle, options.between)
    recoveries = {name: measure_recovery(name, schedule, setting) for name in names}
    parts = [table.overhead_table(samples)] if samples else []
    parts += [table.recovery_table(recoveries)] if recoveries else []
    report = "\n\n".join([*parts, machine_line(facts, _terms(options))])
    print(report)
    if options.json:
        content = {"machine": facts, "overhead": samples, "recovery": recoveries}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.write_readme:
        README.write_text(fill(README.read_text(), report))
    return 0 if (samples or not options.rounds) and all(recoveries.values()) else 1


def measure_overhead(rounds: int, setting: Setting) -> list[Sample]:
    """All samples; none if it failed, which is reported."""
    _say(f"overhead of backups, {rounds} rounds ...")
    with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
        result = Path(folder, "result.json")
        cores = ",".join(map(str, setting.cores))
        words = (sys.executable, "-m", f"{__package__}.overhead_worker", cores, str(rounds), str(result))
        try:
            run_together([Command(words, setting.environ, setting.cores)], Path(folder), setting.deadline)
        except TrialError as error:
            _say(f"failed: {error}")
            return []
        return [
            Sample(saving and Saving(*saving), milliseconds, written)
            for saving, milliseconds, written in json.loads(result.read_text())
        ]


def measure_recovery(name: str, schedule: recovery_trial.Schedule, setting: Setting) -> list:
    """All recoveries of a launcher; none if its run failed, which is reported and does not stop the others."""
    _say(f"{LAUNCHERS[name].title} ...")
    try:
        found = recovery_trial.run(name, schedule, setting)
    except TrialError as error:
        _say(f"failed: {error}")
        return []
    for failure, recovery in found:
        _say(f"  {failure.title}: training again after {recovery.seconds:.2f} s, {recovery.redone} steps redone")
    return found


def _terms(options: argparse.Namespace) -> str:
    parameters = count_parameters(MODEL)
    return (
        f"{MODEL.title} with {parameters:,} parameters, {state_bytes(parameters) / 1e6:.1f} MB with Adam's slots, "
        f"global batch {BATCH}. Overhead: {options.rounds} rounds. Recovery: a backup every {SAVE_EVERY} steps, "
        f"{HANG_TIMEOUT} s until a process counts as hung."
    )


def _say(text: str) -> None:
    # To stderr: stdout is the table.
    print(text, file=sys.stderr, flush=True)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
