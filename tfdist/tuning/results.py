"""The trials of a search, in a file beside the logs, and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from tfdist.atomic_files import write_atomically

_SHOWN = 10
_ERROR_WIDTH = 60


class SearchFile:
    """The file with what has become of the trials of a search.

    Args:
        folder: of the logs.
        number: which call of `search` in the script it is of.
        project: the folder of the project.
    """

    def __init__(self, folder: Path, number: int, project: Path) -> None:
        self._path = folder / f"tfdist-search-{number}.json"
        self._own = {"number": number, "project": str(project)}

    def write(self, is_over: bool, trials: Sequence[dict[str, Any]], **facts: Any) -> None:
        """Replaces the file.

        Args:
            is_over: whether the search is.
            trials: the best one first.
            **facts: about the whole search.

        Raises:
            OSError: it cannot be written.
        """
        whole = {**self._own, **facts, "over": is_over, "trials": list(trials)}
        write_atomically(self._path, json.dumps(whole, default=str))


def files_in(folder: Path) -> list[Path]:
    """The files of searches in a folder of logs.

    Example:
        >>> files_in(Path("no-such-folder"))
        []
    """
    return [path for path in folder.glob("tfdist-search-*.json") if path.stem.rpartition("-")[2].isdigit()]


def searches_in(folder: Path) -> list[dict[str, Any]]:
    """The searches whose files are in a folder of logs, in the order in which the script has begun them."""
    found = (json.loads(path.read_bytes()) for path in files_in(folder))
    return sorted(found, key=lambda search: search["number"])


def table_of(search: dict[str, Any]) -> Table:
    """The best trials of a search.

    Example:
        >>> from tfdist.plain_text import plain_text
        >>> trial = {"trial": "0", "status": "COMPLETED", "score": 0.5, "seconds": 1.26, "error": None}
        >>> search = {"objective": "val_loss", "trials": [{**trial, "hyperparameters": {"units": 8}}]}
        >>> print(plain_text(table_of(search)).rstrip())  # doctest: +NORMALIZE_WHITESPACE
        trial   val_loss   seconds   units
        ──────────────────────────────────
        0            0.5       1.3   8
    """
    trials = search["trials"][:_SHOWN]
    names = list(dict.fromkeys(name for trial in trials for name in trial["hyperparameters"]))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("trial", no_wrap=True)
    table.add_column(search["objective"], justify="right", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for name in names:
        table.add_column(name)
    for trial in trials:
        values = [_text(trial["hyperparameters"].get(name)) for name in names]
        table.add_row(trial["trial"], _outcome(trial), _text(trial["seconds"], ".1f"), *values)
    return table


def summary_of(search: dict[str, Any]) -> str:
    """A search in a line.

    Example:
        >>> summary_of({"over": True, "project": "p", "trials": [{"status": "COMPLETED"}, {"status": "FAILED"}]})
        'search finished: 2 trials, 1 of them failed; p'
    """
    states = [trial["status"] for trial in search["trials"]]
    failed, at_work = states.count("FAILED"), sum(state not in ("COMPLETED", "FAILED") for state in states)
    parts = [f"{len(states)} trial{'' if len(states) == 1 else 's'}"]
    parts += [f"{failed} of them failed"] if failed else []
    parts += [f"{at_work} not ended"] if at_work else []
    return f"search {'finished' if search['over'] else 'not finished'}: {', '.join(parts)}; {search['project']}"


def _outcome(trial: dict[str, Any]) -> str:
    if trial["status"] == "COMPLETED" and trial["score"] is not None:
        return _text(trial["score"])
    error = str(trial["error"] or "").strip().splitlines()
    return f"{trial['status'].lower()}{f': {error[-1][:_ERROR_WIDTH]}' if error else ''}"


def _text(value: Any, form: str = ".6g") -> str:
    if value is None:
        return "-"
    return format(value, form) if isinstance(value, float) else str(value)
