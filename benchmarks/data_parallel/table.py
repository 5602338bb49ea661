"""The result as Markdown, and its place in the README."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.data_parallel.measure import Summary, efficiency, relative_time
from benchmarks.data_parallel.models import MODELS, count_parameters
from benchmarks.data_parallel.peers import Row, Trial
from benchmarks.markdown import table

BEGIN = "<!-- result -->"
END = "<!-- /result -->"
_HEADER = ("Framework", "1 process, ms", "2 processes, ms", "Efficiency", "Time / tfdist's", "Drift")
_MISSING, _SPREAD = "failed", "{median:.2f} ({lowest:.2f}-{highest:.2f})"

Samples = Mapping[Trial, Sequence[Sequence[float]]]


def summaries(samples: Samples) -> dict[Trial, Summary]:
    """A summary of every trial that succeeded in at least one round."""
    return {trial: Summary.of(rounds) for trial, rounds in samples.items() if rounds}


def as_records(rows: Sequence[Row], samples: Samples) -> list[dict]:
    """The lines of the table as plain values; None where a trial failed.

    A line whose model was not measured with tfdist and default settings has no relative time.
    """
    found = summaries(samples)
    references = {
        row.two.workload.model: found.get(row.two)
        for row in reversed(rows)
        if row.two.peer == "tfdist" and row.two.workload.is_default
    }
    records = []
    for row in rows:
        model = row.two.workload.model
        one, two, reference = found.get(row.one), found.get(row.two), references.get(model)
        records.append(
            {
                "model": model,
                "title": row.title,
                "one": one and vars(one),
                "two": two and vars(two),
                "efficiency": efficiency(one, two) if one and two else None,
                "relative_time": relative_time(two, reference) if two and reference else None,
            }
        )
    return records


def as_markdown(records: Sequence[Mapping]) -> str:
    """One table for each model; a cell holds the median and, in brackets, the lowest and the highest sample."""
    parts = []
    for model in dict.fromkeys(record["model"] for record in records):
        shape = MODELS[model]
        lines = [_cells(record) for record in records if record["model"] == model]
        parts.append(f"{shape.title}, {count_parameters(shape):,} parameters:\n\n{table(_HEADER, lines, left=1)}")
    return "\n\n".join(parts)


def machine_line(machine: Mapping, workload_text: str) -> str:
    """One paragraph: what was measured and on what."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    cores = ", ".join(str(core) for core in machine["worker_cores"])
    workers = f" (workers on {cores})" if cores else ""
    return (
        f"{machine['cpu']}, {machine['usable_cores']} cores{workers}; {versions}. {workload_text} "
        f"Load before: {machine['load_before']:.1f}."
    )


def fill(text: str, content: str, begin: str = BEGIN, end: str = END) -> str:
    """Replaces what stands between the two marks of a page.

    Raises:
        ValueError: if the text does not have each mark once, in order.

    Example:
        >>> fill("a <!-- result -->old<!-- /result --> z", "new")
        'a <!-- result -->\\nnew\\n<!-- /result --> z'
    """
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(
            f"the page has {text.count(begin)} {begin} and {text.count(end)} {end}; expected one of each, in this "
            "order. Put both marks where the result belongs."
        )
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}\n{content}\n{end}{tail}"


def _cells(record: Mapping) -> tuple[str, ...]:
    share, relative = record["efficiency"], record["relative_time"]
    return (
        record["title"],
        *(_MISSING if one is None else _SPREAD.format(**one) for one in (record["one"], record["two"])),
        "" if share is None else f"{share:.0%}",
        "" if relative is None else f"{relative:.2f}",
        "" if record["two"] is None else f"{record['two']['drift']:.2f}",
    )
