"""Measures tfdist and its peers in turns and prints the table."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.argument_types import count, first_two_cores, names
from benchmarks.children import Children
from benchmarks.data_parallel import machine, table, trial
from benchmarks.data_parallel.measure import Summary
from benchmarks.data_parallel.models import MODELS
from benchmarks.data_parallel.peers import (
    PEERS,
    VARIANTS,
    Row,
    Trial,
    in_turns,
    make_rows,
    split_available,
    variants_available,
)
from benchmarks.data_parallel.processes import TrialError, end_on_sigterm, say
from benchmarks.data_parallel.workload import Workload

README = Path(__file__).with_name("README.md")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark; returns 1 if a trial failed."""
    options = parse(arguments)
    end_on_sigterm()
    peers, reasons = split_available(options.peers)
    variants, more_reasons = variants_available(options.variants)
    for reason in reasons + more_reasons:
        say(reason)
    try:
        workloads = [_workload(options, model) for model in options.models]
        rows = [row for workload in workloads for row in make_rows(peers, variants, workload)]
    except ValueError as error:
        say(str(error))
        return 2
    facts = machine.describe(options.cores)
    runs = measure(rows, options.rounds, Children(options.cores, options.deadline))
    samples: dict[Trial, list[list[float]]] = {}
    for run in runs:
        samples.setdefault(run["trial"], []).extend([run["samples_ms"]] if "samples_ms" in run else [])
    records = table.as_records(rows, samples)
    report = f"{table.as_markdown(records)}\n\n{table.machine_line(facts, _terms(options))}"
    print(report)
    if options.json:
        plain = [{**run, "trial": _plain(run["trial"])} for run in runs]
        content = {"machine": facts, "rows": records, "runs": plain}
        options.json.write_text(json.dumps(content, indent=1) + "\n")
    if options.write_readme:
        README.write_text(table.fill(README.read_text(), report))
    return 1 if any("error" in run for run in runs) else 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line; ends the program with exit code 2 and a message if it is wrong.

    Example:
        >>> parse(["--models", "mlp", "--rounds", "1"]).models
        ['mlp']
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.data_parallel", description=__doc__)
    add = parser.add_argument
    add("--peers", type=names(PEERS), default=list(PEERS), help=f"of {','.join(PEERS)} (default: all)")
    add("--models", type=names(MODELS), default=list(MODELS), help=f"of {','.join(MODELS)} (default: all)")
    add(
        "--variants",
        type=names(VARIANTS),
        default=list(VARIANTS),
        help=f'more lines for tfdist, of {",".join(VARIANTS)} (default: all; "" for none)',
    )
    add("--rounds", type=count, default=3, help="how often every trial runs (default: %(default)s)")
    add("--windows", type=count, default=5, help="windows of a trial (default: %(default)s)")
    add("--steps", type=count, default=40, help="steps of a window (default: %(default)s)")
    add("--warmup", type=count, default=60, help="steps before the first window (default: %(default)s)")
    add("--batch", type=count, default=64, help="rows of each process in a step (default: %(default)s)")
    add("--deadline", type=float, default=300.0, help="seconds that a trial may take (default: %(default)s)")
    add("--json", type=Path, metavar="FILE", help="write all samples there")
    add("--write-readme", action="store_true", help="put the result into the README of this benchmark")
    options = parser.parse_args(arguments)
    options.cores = first_two_cores(parser)
    return options


def measure(rows: Sequence[Row], rounds: int, children: Children) -> list[dict]:
    """Runs all trials in turns; a trial that fails is reported and does not stop the others."""
    runs = []
    for number, this in in_turns(rows, rounds):
        outcome: dict = {"round": number, "trial": this}
        try:
            outcome.update(trial.run(this, children))
            shown = f"{Summary.of([outcome['samples_ms']]).median:.2f} ms, loss {outcome['loss']:.3f}"
        except TrialError as error:
            outcome["error"] = str(error)
            shown = f"failed: {error}"
        say(f"round {number + 1} of {rounds}, {_name(this)}: {shown}")
        runs.append(outcome)
    return runs


def _workload(options: argparse.Namespace, model: str) -> Workload:
    return Workload(model, 1, options.batch, options.warmup, options.windows, options.steps)


def _terms(options: argparse.Namespace) -> str:
    return (
        f"Batch {options.batch} a process; after {options.warmup} steps of warm-up, medians of {options.rounds} x "
        f"{options.windows} windows of {options.steps} steps, lowest and highest window in brackets."
    )


def _name(this: Trial) -> str:
    workload = this.workload
    parts = [workload.model, this.peer, f"{workload.processes} process{'es' if workload.processes > 1 else ''}"]
    parts += [f"steps_per_execution={workload.steps_per_execution}"] if workload.steps_per_execution > 1 else []
    parts += [workload.transport] if workload.transport != "auto" else []
    return " ".join([*parts, *([workload.compression] if workload.compression else [])])


def _plain(this: Trial) -> dict:
    return {"peer": this.peer, **vars(this.workload)}


if __name__ == "__main__":
    sys.exit(main())
