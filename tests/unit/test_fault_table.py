"""The table of faults is what was measured; what was not says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.checkpointing.recovery import Recovery, recovery
from benchmarks.checkpointing.step_log import Step
from benchmarks.data_parallel.table import fill
from benchmarks.faults.__main__ import report
from benchmarks.faults.rows import PLAIN, ROWS, RUN, set_format
from benchmarks.faults.table import NOT_THERE, table
from tests.unit.pages import ROOT, read
from tfdist.checkpoint.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest
from tools.performance_tables import filled

RESULTS = json.loads(read("benchmarks/faults/results.json"))
PAGE = "docs/fault-tolerance.md"


def test_the_tables_are_those_of_the_results():
    readme = read("benchmarks/faults/README.md")
    assert fill(readme, report(RESULTS)) == readme
    assert filled(read(PAGE), ROOT) == read(PAGE), f"run: python tools/performance_tables.py {PAGE}"


def test_a_fault_that_a_job_cannot_have_says_why():
    measured = {(record["name"], record["under"]) for record in RESULTS["records"]}
    possible = {(row.name, under) for row in ROWS for under in row.under}
    assert measured == possible
    assert set(NOT_THERE) == {(row.name, under) for row in ROWS for under in (RUN, PLAIN)} - possible


def test_a_row_that_was_not_measured_says_so():
    lines = table([]).splitlines()[2:]
    assert len(lines) == 2 * len(ROWS)
    assert all("not measured" in line or "not possible" in line or "not tried" in line for line in lines)


def test_no_training_ends_otherwise():
    for record in RESULTS["records"]:
        assert not record["result"].startswith("other"), record


def test_a_job_that_had_not_trained_yet_has_nothing_to_do_again():
    assert recovery([Step(4.0, 0, 1, 50)], 1.5, ranks=1) == Recovery(2.5, 0)


def test_a_backup_of_a_later_format_is_whole(tmp_path: Path):
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(encode_manifest(Manifest({"epoch": 1}, {}, {})))
    set_format(tmp_path)
    with pytest.raises(ValueError, match="has the format 2"):
        decode_manifest(path.read_bytes())
