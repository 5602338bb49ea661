"""Benchmarks of several parts, each measured by itself: the command line, and what it does."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.argument_types import count, first_two_cores, names
from benchmarks.children import Children
from benchmarks.data_parallel import machine
from benchmarks.data_parallel.processes import ROOT, TrialError, end_on_sigterm, say
from benchmarks.data_parallel.table import fill, machine_line
from benchmarks.process_files import busy_cores

# What a desktop's background takes.
_MOST_BUSY = 0.1


@dataclass(frozen=True)
class Part:
    """A part of a benchmark.

    Attributes:
        title: above its tables.
        measure: returns records, from `children`, the number of samples, and whether a little of it is enough.
        table: the records as Markdown.
        is_usual: whether it is measured unless the command line names it.
    """

    title: str
    measure: Callable[[Children, int, bool], list[dict]]
    table: Callable[[Sequence[Mapping]], str]
    is_usual: bool = True


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, in a package with a README that has a place for the result, and a `results.json`.

    Attributes:
        package: `benchmarks.pipeline`, say.
        description: of the command line.
        parts: by name.
        samples: how often everything is measured, unless the command line says so.
        pins: whether its processes are pinned to the two cores, so that the record names them.
    """

    package: str
    description: str
    parts: Mapping[str, Part]
    samples: int = 3
    pins: bool = True

    @property
    def folder(self) -> Path:
        """The folder of the package."""
        return ROOT.joinpath(*self.package.split("."))

    @property
    def results(self) -> Path:
        """Where all samples are kept."""
        return self.folder / "results.json"

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Runs the benchmark; returns 1 if a part failed, and 2 if the machine is busy."""
        options = self.parse(arguments)
        end_on_sigterm()
        keeps = options.results is not None
        results = json.loads(options.results.read_text()) if keeps and options.results.exists() else {}
        children, failed = Children(options.cores, options.deadline), False
        for part in options.parts:
            busy = busy_cores()
            if busy > _MOST_BUSY and not options.busy_anyway:
                say(
                    f"{busy:.2f} cores are busy with other programs, expected at most {_MOST_BUSY}: times would be "
                    "theirs, too. End them, or measure anyway by --busy-anyway."
                )
                return 2
            facts = {**machine.describe(options.cores if self.pins else ()), "busy_before": busy}
            began = time.monotonic()
            try:
                records = self.parts[part].measure(children, options.samples, options.quick)
            except TrialError as error:
                say(f"{part} failed: {error}")
                failed = True
                continue
            say(f"{part}: {time.monotonic() - began:.0f} s")
            results[part] = {"machine": facts, "records": records}
            if keeps:
                # After each part: what has been measured stays, whatever comes.
                options.results.write_text(json.dumps(results, indent=1) + "\n")
        report = self.report(results)
        print(report)
        if options.write_readme:
            readme = self.folder / "README.md"
            readme.write_text(fill(readme.read_text(), report))
        return 1 if failed else 0

    def parse(self, arguments: Sequence[str] | None = None) -> argparse.Namespace:
        """Reads the command line; ends the program with exit code 2 and a message if it is wrong."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.package}", description=self.description)
        add = parser.add_argument
        every, usual = list(self.parts), [name for name, part in self.parts.items() if part.is_usual]
        shown = "all" if usual == every else ",".join(usual)
        add("--parts", type=names(every), default=usual, help=f'of {",".join(every)} (default: {shown}; "" for none)')
        add("--samples", type=count, default=self.samples, help="how often everything is measured (%(default)s)")
        add("--quick", action="store_true", help="measure a little, to see whether it works; keep nothing")
        add("--busy-anyway", action="store_true", help="measure although other programs compute")
        add("--deadline", type=float, default=300.0, help="seconds that a process may take (default: %(default)s)")
        add(
            "--results",
            type=Path,
            metavar="FILE",
            help=f"parts measured here are renewed there (default: {self.results.name})",
        )
        add("--write-readme", action="store_true", help="put the tables of all parts there into the README")
        options = parser.parse_args(arguments)
        options.cores = first_two_cores(parser)
        if options.quick and options.write_readme:
            parser.error("received --quick and --write-readme, expected only one of them: a README has real results.")
        if options.results is None and not options.quick:
            options.results = self.results
        return options

    def report(self, results: Mapping[str, Mapping]) -> str:
        """All tables, and the machines that they were measured on.

        Args:
            results: what `main` writes as JSON.
        """
        texts = []
        for name, part in self.parts.items():
            if name in results:
                texts += [f"### {part.title}", part.table(results[name]["records"])]
        return "\n\n".join([*texts, *self._machines(results)])

    def _machines(self, results: Mapping[str, Mapping]) -> list[str]:
        """A paragraph for each machine and set of versions, most often one."""
        measured: dict[str, list[tuple[str, float, float]]] = {}
        for part in self.parts:
            if part in results:
                facts = dict(results[part]["machine"])
                busy, load = facts.pop("busy_before"), facts.pop("load_before")
                measured.setdefault(json.dumps(facts), []).append((part, busy, load))
        lines = []
        for facts, found in measured.items():
            busy_parts = ", ".join(f"{part} {busy:.2f}" for part, busy, _ in found)
            # The load of later parts is that of the benchmark itself.
            facts_of_first = {**json.loads(facts), "load_before": found[0][2]}
            terms = f"Cores that other programs kept busy before each part: {busy_parts}."
            lines.append(machine_line(facts_of_first, terms))
        return lines
