"""Lets faults strike trainings, one after another, and writes how they recovered into results.json and the README."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from benchmarks.argument_types import names
from benchmarks.data_parallel import machine
from benchmarks.data_parallel.table import fill, machine_line
from benchmarks.faults.measure import Machine
from benchmarks.faults.rows import ROWS
from benchmarks.faults.table import table
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.operating_system import Interrupted, SignalInbox

_FOLDER = Path(__file__).parent
_RESULTS = _FOLDER / "results.json"
_INTERRUPTED = 130


def main() -> int:
    every = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--only", type=names(every), default=every, help=f"of {','.join(every)} (default: all)")
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds that a fault has (default: %(default)g)")
    parser.add_argument("--once", action="store_true", help="let each fault strike once only")
    parser.add_argument("--results", type=Path, default=_RESULTS, help="rows measured here are renewed there")
    parser.add_argument("--beside", default="", help="what else ran on the machine, for the line below the table")
    options = parser.parse_args()
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", PYTHONPATH=str(_FOLDER.parents[1]))
    facts = {**machine.describe(sorted(os.sched_getaffinity(0))), "beside": options.beside}
    old = json.loads(options.results.read_text())["records"] if options.results.exists() else []
    with SignalInbox() as inbox, Guardian() as guardian, Machine(guardian, inbox, options.deadline) as measuring:
        for row in ROWS:
            for under in row.under if row.name in options.only else ():
                try:
                    record = measuring.measure(row, under, 1 if options.once else row.times)
                except Interrupted as error:
                    print(f"{error}: ended")
                    return _INTERRUPTED
                print(json.dumps(record), flush=True)
                old = [other for other in old if (other["name"], other["under"]) != (row.name, under)] + [record]
                # After each row: what has been measured stays, whatever comes.
                options.results.write_text(json.dumps({"machine": facts, "records": old}, indent=1) + "\n")
    if options.results == _RESULTS:
        readme = _FOLDER / "README.md"
        readme.write_text(fill(readme.read_text(), report(json.loads(_RESULTS.read_text()))))
    return 0


def report(results: dict) -> str:
    """The table and the machine, as they stand in the README."""
    facts = dict(results["machine"])
    beside = facts.pop("beside")
    return f"{table(results['records'])}\n\n{machine_line(facts, beside)}"


if __name__ == "__main__":
    sys.exit(main())
