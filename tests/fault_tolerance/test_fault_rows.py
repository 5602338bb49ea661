"""Some rows of the table of faults, for real: the same end as without the fault, and no more steps done again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import SAVE_EVERY

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.cluster, pytest.mark.timeout(600)]

DEADLINE = 540
# After which of them how many steps are done again, at most.
MOST = {"flip": 2 * SAVE_EVERY, "term-one": 0, "crash": 0}


def test_rows_of_the_table(tmp_path: Path):
    results = tmp_path / "results.json"
    words = ["--only", ",".join(MOST), "--results", str(results), "--deadline", "120"]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.faults", *words])
    try:
        assert process.wait(DEADLINE) == 0
    finally:
        # SIGTERM has it end what it has started, and so has its guardian if it is killed.
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    records = json.loads(results.read_text())["records"]
    assert len(records) == 2 * len(MOST)
    for record in records:
        assert record["result"] == "identical", record
        assert max(record["redone"]) <= MOST[record["name"]], record
        assert None not in record["detected"], record
