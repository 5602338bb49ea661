"""The trials of a search, as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from tfdist.launcher.output import Outlet
from tfdist.plain_text import plain_table, plain_text

_SHOWN = 10
_ERROR_WIDTH = 60


def show(searches: Sequence[dict[str, Any]]) -> None:
    """Shows searches on the standard output; perhaps nobody reads that."""
    text = "".join(f"{summary_of(one)}\n\n{plain_text(table_of(one)).rstrip()}\n" for one in searches)
    shown = Outlet(sys.stdout)
    shown.write(text.encode(errors="surrogateescape"))
    shown.writer.close()


def table_of(search: dict[str, Any]) -> Table:
    """The best trials of a search.

    Example:
        >>> from tfdist.plain_text import plain_text
        >>> trial = {"trial": "0", "status": "COMPLETED", "score": 0.5, "error": None}
        >>> search = {"objective": "val_loss", "trials": [{**trial, "hyperparameters": {"units": 8}}]}
        >>> print(plain_text(table_of(search)).rstrip())  # doctest: +NORMALIZE_WHITESPACE
        trial   val_loss   units
        ────────────────────────
        0            0.5   8
    """
    trials = search["trials"][:_SHOWN]
    names = list(dict.fromkeys(name for trial in trials for name in trial["hyperparameters"]))
    rows = (
        (trial["trial"], _outcome(trial), *(_text(trial["hyperparameters"].get(name, "-")) for name in names))
        for trial in trials
    )
    return plain_table(("trial", search["objective"], *names), rows, right=(search["objective"],), wraps=names)


def summary_of(search: dict[str, Any]) -> str:
    """A search in a line.

    Example:
        >>> summary_of({"over": True, "project": "p", "trials": [{"status": "COMPLETED"}, {"status": "FAILED"}]})
        'search finished: 2 trials, 1 failed; p'
    """
    states = [trial["status"] for trial in search["trials"]]
    failed = states.count("FAILED")
    at_work = len(states) - failed - states.count("COMPLETED")
    parts = [f"{len(states)} trial{'' if len(states) == 1 else 's'}"]
    parts += [f"{count} {what}" for count, what in ((failed, "failed"), (at_work, "not ended")) if count]
    return f"search {'finished' if search['over'] else 'not finished'}: {', '.join(parts)}; {search['project']}"


def _outcome(trial: dict[str, Any]) -> str:
    if trial["score"] is not None:
        return _text(trial["score"])
    error = str(trial["error"] or "").strip().splitlines()
    return f"{trial['status'].lower()}{f': {error[-1][:_ERROR_WIDTH]}' if error else ''}"


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
