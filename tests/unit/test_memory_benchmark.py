from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import argument_types
from benchmarks.memory import tables
from benchmarks.memory.__main__ import BENCHMARK
from benchmarks.memory.variants import OFFLOAD, PLAIN, RECOMPUTE, REMAT_SCOPE

MACHINE = {
    "cpu": "A fast one",
    "usable_cores": 2,
    "worker_cores": [0, 1],
    "load_before": 0.5,
    "busy_before": 0.01,
    "versions": {"keras": "3"},
}


def activation(variant: str, **result: object) -> dict:
    return {"shape": "mlp", "depth": 4, "jit_compile": False, "device": "CPU:0", "variant": variant, **result}


def test_activations() -> None:
    records = [
        activation(PLAIN, peak=20_000_000, samples_ms=[10.0, 20.0, 10.0]),
        activation(RECOMPUTE, peak=5_000_000, samples_ms=[13.0, 28.0, 12.0]),
        activation(REMAT_SCOPE, error="ValueError: no"),
        {**activation(PLAIN, peak=1_000_000, samples_ms=[1.0]), "jit_compile": True},
    ]
    title, _, *lines = tables.activations(records).splitlines()
    assert title == "Residual MLP, width 64, 256 inside of a block, batch 1024, on CPU:0:"
    assert lines[:5] == [
        "| Blocks | Variant | Peak, MB | / plain | ms a step | Time / plain |",
        "| --- | --- | --: | --: | --: | --: |",
        "| 4 | plain Keras | 20.0 | 1.00 | 10.0 | 1.00 (1.00-1.00) |",
        '| 4 | tfdist "recompute" | 5.0 | 0.25 | 13.0 | 1.30 (1.20-1.40) |',
        "| 4 | keras.RematScope | failed: ValueError: no |  |  |  |",
    ]
    assert lines[6].endswith("batch 1024, with XLA, on CPU:0:")


def test_ratios_are_empty_if_plain_training_has_failed() -> None:
    records = [activation(PLAIN, error="OOM"), activation(RECOMPUTE, peak=5_000_000, samples_ms=[13.0])]
    assert tables.activations(records).splitlines()[-1] == '| 4 | tfdist "recompute" | 5.0 |  | 13.0 |  |'


def test_host() -> None:
    records = [
        {"shape": "mlp", "depth": depth, "variant": variant, "device": factor * depth * 10**6, "host": depth * 10**5}
        for depth in (4, 16)
        for variant, factor in ((PLAIN, 2), (OFFLOAD, 1))
    ]
    assert tables.host(records).splitlines()[2:] == [
        "| Variant | Device, 4 blocks | Device, 16 blocks | Host, 4 blocks | Host, 16 blocks |",
        "| --- | --: | --: | --: | --: |",
        "| plain Keras | 8.0 | 32.0 | 0.4 | 1.6 |",
        "| tfdist.HostOffloadStrategy | 4.0 | 16.0 | 0.4 | 1.6 |",
    ]


def sharding() -> list[dict]:
    of_replicas = {"shape": "few rows", "strategy": "MirroredStrategy"}
    return [
        {**of_replicas, "sharded": False, "slot_bytes": 32_000_000, "samples_ms": [10.0, 20.0, 10.0]},
        {**of_replicas, "sharded": True, "slot_bytes": 16_000_000, "samples_ms": [11.0, 21.0, 12.0]},
    ]


def test_sharding() -> None:
    assert tables.sharding(sharding()).splitlines()[2] == (
        "| 4 Dense layers of 1024, batch 64 | MirroredStrategy | 10.0 (10.0-20.0) | 12.0 (11.0-21.0) "
        "| 1.10 (1.05-1.20) | 32.0 | 16.0 | 0.50 |"
    )


def test_report_has_a_paragraph_for_each_machine() -> None:
    first, other = ({"machine": {**MACHINE, "cpu": cpu}, "records": sharding()} for cpu in ("A", "B"))
    assert BENCHMARK.report({"sharding": first}).startswith("### Slots of Adam, split over two replicas\n\n| Model |")
    lines = BENCHMARK.report({"sharding": first, "host": {**other, "records": HOST}}).splitlines()
    assert [line.partition(",")[0] for line in lines if "Cores that other programs" in line] == ["B", "A"]
    assert lines[0] == "### What is left on the device", "parts are in their order"


HOST = [{"shape": "mlp", "depth": 4, "variant": PLAIN, "device": 1, "host": 1}]


def test_results_are_kept_and_reported_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"host": {"machine": MACHINE, "records": HOST}}))
    assert BENCHMARK.main(["--parts", "", "--results", str(file)]) == 0
    assert "| plain Keras | 0.0 | 0.0 |" in capsys.readouterr().out
    assert BENCHMARK.parse([]).results == BENCHMARK.results
    assert BENCHMARK.parse(["--quick"]).results is None


def test_names_that_are_chosen() -> None:
    assert argument_types.names({"a": 1, "b": 2})("b,a") == ["b", "a"]
