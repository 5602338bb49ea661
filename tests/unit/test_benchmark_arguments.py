"""What every benchmark has: its options, and a README with a place for its result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.checkpointing import arguments as checkpointing
from benchmarks.data_parallel import arguments as data_parallel
from benchmarks.data_parallel.table import BEGIN, END, fill
from benchmarks.memory.__main__ import BENCHMARK as MEMORY
from benchmarks.parameter_server import arguments as parameter_server

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("parse", "words", "message"),
    [
        (data_parallel.parse, ["--peers", "horovod"], "'horovod': expected names of tfdist, tf_keras, torch"),
        (data_parallel.parse, ["--rounds", "0"], "'0': expected a whole number from 1 on"),
        (data_parallel.parse, ["--cores", "0"], "'0': expected two different numbers of cores, such as 0,1"),
        (data_parallel.parse, ["--cores", "0,999999"], "cores 0,999999: expected two of"),
        (data_parallel.parse, ["--env", "A"], "'A': expected KEY=VALUE"),
        (
            parameter_server.parse,
            ["--only", "lstm"],
            "'lstm': expected names of dense, wide, sleep, inflight, embedding",
        ),
        (parameter_server.parse, ["--repeats", "0"], "'0': expected a whole number from 1 on"),
        (parameter_server.parse, ["--quick", "--write-readme"], "expected only one of them: a README has real results"),
        (checkpointing.parse, ["--launchers", "mpirun"], "invalid choice: 'mpirun'"),
        (checkpointing.parse, ["--cores", "0", "0"], "cores [0, 0]: expected two of"),
        (checkpointing.parse, ["--repeats", "0"], "--rounds 3 --repeats 0: expected at least 0 and 1"),
        (MEMORY.main, ["--parts", "lstm"], "'lstm': expected names of activations, host, sharding"),
        (MEMORY.main, ["--samples", "0"], "'0': expected a whole number from 1 on"),
        (MEMORY.main, ["--quick", "--write-readme"], "expected only one of them: a README has real results"),
    ],
)
def test_wrong_arguments(parse, words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("parse", [parameter_server.parse, MEMORY.parse])
def test_one_core_is_too_few(parse, monkeypatch, capsys):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(SystemExit):
        parse([])
    assert "received 1 usable core, expected two" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["checkpointing", "data_parallel", "memory", "parameter_server"])
def test_readme_has_a_place_for_the_result(name):
    text = (FOLDER / name / "README.md").read_text()
    filled = fill(text, "| new |")
    assert f"{BEGIN}\n| new |\n{END}" in filled
    assert fill(filled, "| new |") == filled


def test_a_readme_without_a_place_for_the_result():
    with pytest.raises(ValueError, match=r"0 <!-- result --> and 0 <!-- /result -->; expected one of each"):
        fill("nothing", "| new |")
