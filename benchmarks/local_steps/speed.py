"""Steps of two workers, each in a network namespace of its own and on a core of its own."""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.children import Children, make_environ, tensorflow_places, torch_places
from benchmarks.data_parallel.models import MODELS
from benchmarks.data_parallel.processes import Command, TrialError, program, result_of, say
from benchmarks.markdown import spread, table
from benchmarks.network.links import ADDRESSES, DEVICE, NETWORKS, joined

SYNC_EVERY = 50
# What trains, by its name in the table: the module, after how many steps the workers exchange (0: in each), and in how
# many parts.
CASES = {
    "data parallelism": ("keras_worker", 0, 1),
    f"`LocalStepsStrategy({SYNC_EVERY})`": ("keras_worker", SYNC_EVERY, 1),
    f"`LocalStepsStrategy({SYNC_EVERY}, fragments=5)`": ("keras_worker", SYNC_EVERY, 5),
    f"PyTorch's post_localSGD, {SYNC_EVERY}": ("torch_worker", SYNC_EVERY, 1),
}
_LINKS = ("1g", "200m", "far")
_PORT = 29500


def measure(children: Children, samples: int, quick: bool) -> list[dict]:
    """One record for each model, link and case; those of one process have no link."""
    cases = {
        name: case for name, case in CASES.items() if case[0] == "keras_worker" or importlib.util.find_spec("torch")
    }
    records = []
    for model in ["mlp"] if quick else list(MODELS):
        settings = {"model": model, "batch": 128, "windows": 2 if quick else 4, "steps": SYNC_EVERY}
        for module in dict.fromkeys(module for module, *_ in cases.values()):
            for count in (1, 2):
                say(f"{model}, {module}, {count} without exchange ...")
                lone = [_lone(children, module, settings, count) for _ in range(1 if quick else samples)]
                records.append({"model": model, "link": "", "case": module, "count": count, "trials": lone})
        for link, (name, (module, sync_every, parts)) in itertools.product(
            _LINKS[1:2] if quick else _LINKS, cases.items()
        ):
            record: dict[str, Any] = {"model": model, "link": link, "case": name, "trials": []}
            for sample in range(1 if quick else samples):
                say(f"{model}, {NETWORKS[link].title}, {name}, sample {sample + 1} ...")
                try:
                    record["trials"].append(
                        _joined(
                            children,
                            module,
                            {**settings, "sync_every": sync_every, "fragments": parts, "processes": 2},
                            link,
                        )
                    )
                except TrialError as error:
                    say(f"failed: {error}")
            if record["trials"]:
                records.append(record)
    return records


def _lone(children: Children, module: str, settings: Mapping[str, Any], count: int) -> dict:
    """Processes side by side, each on a core of its own, that know nothing of each other: the result of the first."""
    settings = {**settings, "sync_every": 0, "processes": 1}

    def commands(folder: Path, result: str) -> list[Command]:
        results = [result, *(str(folder / f"other-{number}.json") for number in range(1, count))]
        environ = make_environ(os.environ, {})
        return [
            Command(program(f"{__package__}.{module}", settings, path), environ, (core,))
            for path, core in zip(results, children.cores, strict=False)
        ]

    return result_of(commands, children.deadline)


def _joined(children: Children, module: str, settings: Mapping[str, Any], link: str) -> dict:
    with joined(NETWORKS[link]) as namespaces:
        addresses = [f"{address}:{_PORT}" for address in ADDRESSES]
        places = torch_places(addresses, DEVICE) if module == "torch_worker" else tensorflow_places(addresses)
        return children.side_by_side(f"{__package__}.{module}", settings, places, namespaces)


def table_of(records: Sequence[Mapping]) -> str:
    """A line for each record; efficiency is the time of a step of two without exchange over that of two with it."""
    header = ["Model", "Link", "", "Step, ms", "Efficiency", "KB sent a step", "Drift"]
    without = {
        (record["model"], record["case"]): _milliseconds(record)
        for record in records
        if not record["link"] and record["count"] == 2
    }
    lines = []
    for record in records:
        windows = [one for trial in record["trials"] for one in trial["ms"]]
        module = CASES[record["case"]][0] if record["link"] else record["case"]
        base = without[record["model"], module]
        reached = [base / statistics.median(trial["ms"]) for trial in record["trials"]]
        sent = statistics.median(one for trial in record["trials"] for one in trial["bytes"]) / 1e3
        half = len(record["trials"][0]["ms"]) // 2
        drifts = [statistics.median(t["ms"][half:]) / statistics.median(t["ms"][:half]) for t in record["trials"]]
        if record["link"]:
            link, case = NETWORKS[record["link"]].title, record["case"]
        else:
            link = "one process" if record["count"] == 1 else "two processes, no exchange"
            case = {"keras_worker": "Keras", "torch_worker": "PyTorch"}[module]
        figures = [spread(windows, 1), spread(reached), f"{sent:.1f}", f"{statistics.median(drifts):.2f}"]
        lines.append([MODELS[record["model"]].title, link, case, *figures])
    return table(header, lines, left=3)


def _milliseconds(record: Mapping) -> float:
    """Of a step: the median of all windows."""
    return statistics.median(one for trial in record["trials"] for one in trial["ms"])
