"""Fills the tables of docs/features.md with what the tests run: which row under which strategy, in which tier.

Read are the parameters and marks of the test functions; nothing is run.

Example:
    python tools/feature_matrix.py docs/features.md
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
_NEVER = "\N{EN DASH}"

# Marks of tests that the gate leaves out.
_LEFT_OUT = {"nightly", "timing"}
SERVERS = "tests/parameter_server/test_features.py"
# The columns of the feature table: the tests that compare a row with one process. Stock's is measured otherwise.
ROWS = {
    "Mirrored": ["tests/logical/test_features.py::test_equals_one_process"],
    "MultiWorker": [
        "tests/cluster/test_features.py::test_equals_one_process",
        "tests/cluster/test_features.py::test_with_two_devices_each_equals_one_process",
        "tests/cluster/test_features.py::test_the_rest_equals_one_process",
    ],
    "FullySharded": [
        "tests/logical/test_fully_sharded.py::test_equals_one_process",
        "tests/cluster/test_fully_sharded.py::test_equals_one_process",
        "tests/cluster/test_fully_sharded.py::test_all_that_is_exchanged_equals_one_process",
    ],
    "Horovod": [
        "tests/horovod/test_features.py::test_weights_are_those_of_one_process_but_for_rounding",
        "tests/horovod/test_features.py::test_equals_one_process",
    ],
    "servers, sync": [f"{SERVERS}::test_synchronous_training_equals_one_process"],
    "servers, async": [f"{SERVERS}::test_one_execution_at_a_time_equals_one_process"],
}
REFUSED = f"{SERVERS}::test_what_is_refused"

STRATEGIES = ("Mirrored", "MultiWorker", "FullySharded", "Horovod", "servers", "Pipeline", "HostOffload")
# What else is tested: a part of a test's parameters in brackets; without, all of its cases.
_RESUME, _PIPELINE = "tests/fault_tolerance", "tests/logical/test_pipeline"
_AS_ONE = "tests/cluster/test_as_one_process.py"
TOPICS = {
    "`fit` inside and outside the scope": {
        "Mirrored": ROWS["Mirrored"],
        "MultiWorker": ROWS["MultiWorker"],
        "FullySharded": ROWS["FullySharded"],
        "Horovod": ROWS["Horovod"],
        "servers": [*ROWS["servers, sync"], *ROWS["servers, async"]],
    },
    "a model created in the scope, and compiled, built, extended or quantized outside": {
        "Mirrored": ["tests/logical/test_outside_of_the_scope.py::test_equals_one_process[names]"],
        "MultiWorker": [f"{_AS_ONE}::test_section[finished_outside_of_the_scope]"],
    },
    "reading weights and state inside the scope": {
        "MultiWorker": [f"{_AS_ONE}::test_section[reading_inside_and_outside]"],
        "Horovod": [f"{_AS_ONE}::test_over_horovod[reading_inside_and_outside]"],
    },
    "saved and loaded models": {
        "MultiWorker": ["tests/cluster/test_saving.py::test_section[all_formats]"],
        "FullySharded": ["tests/cluster/test_fully_sharded.py::test_files_and_backups_hold_whole_weights"],
        "servers": ["tests/parameter_server/test_saving.py::test_section[whole_model]"],
        "Pipeline": [f"{_PIPELINE}_fit.py::test_saved_model_goes_on"],
        "HostOffload": ["tests/logical/test_host_offload.py::test_files"],
    },
    "callbacks that write files": {
        "MultiWorker": ["tests/cluster/test_saving.py::test_section[callbacks_that_write]"],
        "servers": ["tests/parameter_server/test_saving.py::test_section[checkpoints]"],
        "Pipeline": [f"{_PIPELINE}_fit.py::test_callbacks"],
    },
    "`on_chief`": {
        **{
            name: [f"tests/logical/test_chief_only.py::test_every_strategy_has_a_chief[{name}]"]
            for name in ("Mirrored", "Pipeline", "HostOffload")
        },
        "MultiWorker": ["tests/cluster/test_on_chief.py::test_on_two_processes"],
        "Horovod": ["tests/horovod/test_callbacks.py::test_two_processes"],
        "servers": ["tests/cluster/test_on_chief.py::test_with_parameter_servers"],
    },
    "`model.stop_training` on some processes": {
        "MultiWorker": ["tests/cluster/test_stop_training.py::test_all_leave_after_the_same_step"],
        "Horovod": ["tests/cluster/test_stop_training.py::test_over_horovod"],
    },
    "resuming after a kill or interruption (`BackupAndRestore`)": {
        "Mirrored": [f"{_RESUME}/test_resume.py::test_kill[two devices]"],
        "MultiWorker": [f"{_RESUME}/test_resume_workers.py::test_killed"],
        "FullySharded": ["tests/cluster/test_fully_sharded.py::test_files_and_backups_hold_whole_weights"],
        "Horovod": ["tests/horovod/test_launch.py::test_a_killed_rank_changes_nothing"],
        "servers": ["tests/parameter_server/test_saving.py::test_section[backups]"],
        "Pipeline": [f"{_PIPELINE}_fit.py::test_backup_and_restore"],
    },
    "resuming with another number of processes": {
        "MultiWorker": [f"{_RESUME}/test_resume_workers.py::test_another_number_of_workers"],
    },
    "`tfdist run` continues after a process dies": {
        "MultiWorker": [f"{_RESUME}/test_drill.py::test_a_training_survives"],
        "Horovod": ["tests/horovod/test_launch.py::test_a_killed_rank_changes_nothing"],
        "servers": ["tests/launcher/test_parameter_server_training.py::test_lost_processes_cost_nothing"],
    },
    "your own training loops": {
        "Mirrored": ["tests/logical/test_own_loops.py::test_equals_one_device"],
        "MultiWorker": [f"{_AS_ONE}::test_section[loops_of_ones_own]"],
        "Horovod": [f"{_AS_ONE}::test_over_horovod[loops_of_ones_own]"],
    },
    "unequal shares of each batch (`batch_shares`), as given": {
        "Mirrored": ["tests/logical/test_batch_shares.py::test_equals_one_process"],
        "MultiWorker": ["tests/cluster/test_features.py::test_with_unequal_shares_equals_one_process"],
        "FullySharded": ["tests/cluster/test_fully_sharded.py::test_with_unequal_shares_equals_one_process"],
    },
    'unequal shares by speed (`batch_shares="auto"`)': {
        "MultiWorker": ["tests/cluster/test_batch_shares.py::test_shares_change_and_the_result_does_not[endless]"],
    },
    "memory policies change nothing": {
        "Mirrored": [
            "tests/logical/test_memory_transparency.py::test_every_mode_on_two_replicas",
        ],
        "MultiWorker": [
            "tests/cluster/test_memory_policies.py::test_weights_are_those_of_plain_training_and_all_processes_choose_the_same"
        ],
        "FullySharded": ["tests/logical/test_fully_sharded.py::test_deep_models_equal_one_process"],
        "Pipeline": [f"{_PIPELINE}_memory.py::test_equal_bit_for_bit"],
        "HostOffload": ["tests/logical/test_host_offload.py::test_equal_to_plain_training"],
    },
    "other models, optimizers and losses": {
        "Pipeline": [
            f"{_PIPELINE}_models.py::test_equals_one_process",
            f"{_PIPELINE}_optimizers.py::test_equals_one_process",
        ],
        "HostOffload": ["tests/logical/test_host_offload.py::test_optimizers_losses_and_constraints"],
    },
}


@functools.cache
def cases(place: str) -> list[tuple[tuple[str, ...], bool]]:
    """The cases of a test: the texts and names of its parameters, and whether `make test` runs it.

    Args:
        place: "tests/x/test_y.py::test_z".

    Raises:
        ValueError: if there is no such test.
    """
    path, *names = place.split("::")
    part: Any = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    marks = _marks(part)
    for name in names:
        if not hasattr(part, name):
            raise ValueError(f"Received: {place}. Expected: a test that exists; correct it in tools/feature_matrix.py.")
        part = getattr(part, name)
        marks += _marks(part)
    lists = [list(_parameters(mark)) for mark in marks if mark.name == "parametrize"]
    is_daily = not any(mark.name in _LEFT_OUT for mark in marks)
    return [
        (tuple(itertools.chain.from_iterable(texts for texts, _ in one)), is_daily and all(daily for _, daily in one))
        for one in itertools.product(*lists)
    ]


def _marks(part: Any) -> list[Any]:
    marks = getattr(part, "pytestmark", [])
    return list(marks) if isinstance(marks, (list, tuple)) else [marks]


def _parameters(mark: Any) -> Iterator[tuple[tuple[str, ...], bool]]:
    named = mark.kwargs.get("ids")
    for given in mark.args[1]:
        values = given.values if hasattr(given, "marks") else given if isinstance(given, tuple) else (given,)
        own = [one.name for one in getattr(given, "marks", ())]
        texts = map(str, values) if named is str else (value for value in values if isinstance(value, str))
        yield tuple(texts), not _LEFT_OUT.intersection(own)


def tier(places: list[str], row: str | None = None, sign: str = "=") -> str:
    """A cell: the sign if `make test` runs a case, in brackets if only `make nightly` does, a dash if there is none.

    Args:
        places: tests, with or without a parameter in brackets.
        row: a parameter that the cases have to have.
        sign: what the tests find.
    """
    found = []
    for place in places:
        test, _, wanted = place.removesuffix("]").partition("[")
        own = [(texts, daily) for texts, daily in cases(test) if not wanted or wanted in texts]
        if not own:
            raise ValueError(f"Received: {place}. Expected: a case that exists; correct it in tools/feature_matrix.py.")
        found += [daily for texts, daily in own if row is None or row in texts]
    return (sign if any(found) else f"({sign})") if found else _NEVER


def cell(column: str, row: str) -> str:
    """What the tests find of a row of the feature table under a strategy."""
    if column.startswith("servers"):
        mode = column.split()[-1]
        tests = importlib.import_module(SERVERS.removesuffix(".py").replace("/", "."))
        for texts, daily in cases(REFUSED):
            if texts == (mode, row):
                return "✗" if daily else "(✗)"
        different = tests.PER_SHARD | tests.LOGGED_BEFORE if mode == "sync" else ()
        return tier(ROWS[column], row, "≠" if row in different else "=")
    return tier(ROWS[column], row)


def feature_table(stock: dict[str, str]) -> str:
    """The feature table.

    Args:
        stock: what tools/stock_features.py has found, by row.
    """
    from tests.features.table import FEATURES

    head = ["Feature", *ROWS, "Stock"]
    lines = [[name, *(cell(column, name) for column in ROWS), stock.get(name, "?")] for name in FEATURES]
    return _table([head, ["---"] * len(head), *lines])


def topic_table() -> str:
    """The table of everything else."""
    head = ["What", *STRATEGIES]
    lines = [
        [what, *(tier(places[name], sign="✓") if name in places else _NEVER for name in STRATEGIES)]
        for what, places in TOPICS.items()
    ]
    return _table([head, ["---"] * len(head), *lines])


def _table(lines: list[list[str]]) -> str:
    return "\n".join("|---" * len(line) + "|" if line[0] == "---" else f"| {' | '.join(line)} |" for line in lines)


def filled(text: str) -> str:
    """The page with both tables renewed."""
    from benchmarks.data_parallel.table import fill

    stock = {
        cells[1].strip(): cells[-2].strip() for cells in (line.split("|") for line in text.splitlines() if "|" in line)
    }
    for name, table in (("features", feature_table(stock)), ("topics", topic_table())):
        text = fill(text, f"\n{table}\n", f"<!-- {name} -->", f"<!-- /{name} -->")
    return text


def main(arguments: list[str]) -> int:
    """Renews the tables in the file that is named; returns the exit code."""
    sys.path.insert(0, str(_ROOT))
    for path in map(Path, arguments):
        path.write_text(filled(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
