"""Benchmarks: their options, what they measure, and the tables that they make."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks.checkpointing import table as backup_tables
from benchmarks.checkpointing.__main__ import BENCHMARK as BACKUPS
from benchmarks.checkpointing.recovery import Recovery, recovery
from benchmarks.checkpointing.saving import (
    ASYNCHRONOUS,
    KERAS,
)
from benchmarks.checkpointing.step_log import parse
from benchmarks.data_parallel import __main__ as data_parallel
from benchmarks.data_parallel import peers, processes, table
from benchmarks.data_parallel.table import BEGIN, END, fill
from benchmarks.data_parallel.workload import Workload
from benchmarks.local_steps import loss as local_loss
from benchmarks.local_steps import speed as local_speed
from benchmarks.memory import tables
from benchmarks.memory.__main__ import BENCHMARK
from benchmarks.memory.variants import PLAIN, RECOMPUTE, REMAT_SCOPE
from benchmarks.parameter_server import tables as server_tables
from benchmarks.parameter_server.__main__ import BENCHMARK as SERVERS
from benchmarks.parameter_server.trials import Case
from benchmarks.parameter_server.trials import Trial as ServerTrial
from benchmarks.sharded import tables as sharded_tables
from benchmarks.sharded.__main__ import BENCHMARK as SHARDED
from benchmarks.shares import trials as share_trials

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("parse", "words", "message"),
    [
        (data_parallel.parse, ["--peers", "horovod"], "'horovod': expected names of tfdist, tf_keras, torch"),
        (SERVERS.parse, ["--samples", "0"], "'0': expected a whole number from 1 on"),
        (BACKUPS.main, ["--parts", "restart"], "'restart': expected names of overhead, recovery"),
        (BENCHMARK.main, ["--quick", "--write-readme"], "expected only one of them: a README has real results"),
    ],
)
def test_wrong_arguments(parse, words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["checkpointing", "data_parallel", "local_steps", "memory", "parameter_server", "sharded", "shares"]
)
def test_readme_has_a_place_for_the_result(name):
    filled = fill((FOLDER / name / "README.md").read_text(), "| new |")
    assert f"{BEGIN}\n| new |\n{END}" in filled
    with pytest.raises(ValueError, match=r"0 <!-- result --> and 0 <!-- /result -->; expected one of each"):
        fill("nothing", "| new |")


def test_table() -> None:
    rows = peers.make_rows(("tfdist", "torch"), (), Workload("mlp", 1))
    samples = {rows[0].one: [[6.0, 7.0], [8.0]], rows[0].two: [[10.0]], rows[1].one: [[5.0]], rows[1].two: [[12.5]]}
    assert table.as_markdown(table.as_records(rows, samples)) == (
        "MLP, 1,863,690 parameters:\n\n"
        "| Framework | 1 process, ms | 2 processes, ms | Efficiency | Time / tfdist's | Drift |\n"
        "| --- | --: | --: | --: | --: | --: |\n"
        "| tfdist | 7.00 (6.00-8.00) | 10.00 (10.00-10.00) | 70% | 1.00 | 1.00 |\n"
        "| PyTorch DDP (gloo) | 5.00 (5.00-5.00) | 12.50 (12.50-12.50) | 40% | 1.25 | 1.00 |"
    )


def test_a_failure_ends_the_other_process_and_shows_its_log(tmp_path: Path) -> None:
    waits = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    fails = (
        f"import os, time\nwhile not os.path.getsize({str(tmp_path / 'log-0')!r}): time.sleep(0.01)\n"
        "print('went wrong'); raise SystemExit(3)"
    )
    cores = tuple(os.sched_getaffinity(0))
    commands = [processes.Command((sys.executable, "-c", code), dict(os.environ), cores) for code in (waits, fails)]
    with pytest.raises(processes.TrialError, match=r"(?s)process 1 ended with 3; expected 0.*went wrong"):
        processes.run_together(commands, tmp_path, deadline=60)
    pid = int((tmp_path / "log-0").read_text().split()[1])
    assert not Path(f"/proc/{pid}").exists()


def sample(ms: float, **others: float) -> dict:
    return {"ms": ms, "chief_cpu_ms": 1.5, "draw_cpu_ms": 0.25, "bytes": None, **others}


def test_table_of_parameter_servers() -> None:
    case = Case("dense")
    plain, own, stock = (
        ServerTrial(case, "plain"),
        ServerTrial(case, "tfdist", 2),
        ServerTrial(case, "tf_keras", 2, worker_input=True),
    )
    of_cluster = {"ps_cpu_ms": 0.5, "worker_cpu_ms": 2.0, "bytes": 61_250.0}
    samples = {
        plain: [sample(1.0), sample(2.0), sample(3.0)],
        own: [sample(4.0, **of_cluster)],
        stock: [sample(6.0, **of_cluster)],
    }
    trials = [plain, own, stock, ServerTrial(case, "tfdist", 1)]
    records = [{"trial": trial.to_dict(), "samples": samples.get(trial, [])} for trial in trials]
    assert server_tables.table_of(records).splitlines() == [
        "Dense 64-64-1 on 32 features, batch 32:",
        "",
        "| Framework | Workers | ms a step | Speed / plain | Speed / tf_keras | Chief's CPU, ms | Without data "
        "| ps' CPU, ms | Workers' CPU, ms | KB a step |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| Keras 3, one process |  | 2.00 (1.00-3.00) | 1.00 |  | 1.50 | 1.25 |  |  |  |",
        "| tfdist | 2 | 4.00 (4.00-4.00) | 0.50 | 1.50 | 1.50 | 1.25 | 0.50 | 2.00 | 61.2 |",
        "| tf_keras, tf.distribute | 2 | 6.00 (6.00-6.00) | 0.33 |  | 1.50 | 1.25 | 0.50 | 2.00 | 61.2 |",
        "| tfdist | 1 | failed |  |  |  |  |  |  |  |",
    ]


def test_overhead_table() -> None:
    without = (None, [20.0, 22.0, 30.0], None)
    samples = [without, ([ASYNCHRONOUS, 1], [33.0, 44.0], 0.3), without, ([KERAS, 8], [22.0], None), without]
    assert backup_tables.overhead(samples).splitlines()[:7] == [
        "| Backup | every step | every 8 steps | every 64 steps | Written at every step |",
        "| --- | --: | --: | --: | --: |",
        "| tfdist, asynchronous | 1.75 (1.50-2.00) | failed | failed | 30% |",
        "| tfdist, synchronous | failed | failed | failed |  |",
        "| keras.callbacks.BackupAndRestore | failed | 1.00 (1.00-1.00) | failed |  |",
        "",
        "Without backups a step takes 22.0 (20.0-30.0) ms: MLP with 2,603,850 parameters, 31.2 MB with Adam's slots, "
        "global batch 256.",
    ]


def test_recovery_table() -> None:
    def record(failure: str, seconds: float, redone: int) -> dict:
        return {"launcher": "tfdist", "failure": failure, "seconds": seconds, "redone": redone}

    records = [record("worker killed", 3.0, 4), record("chief killed", 2.5, 1), record("worker killed", 4.0, 6)]
    assert backup_tables.recovery(records).splitlines()[:5] == [
        "| Failure | tfdist run |",
        "| --- | --: |",
        "| worker killed | 3.5 s (3.0-4.0), 5 steps |",
        "| chief killed | 2.5 s (2.5-2.5), 1 step |",
        "| worker stopped (SIGSTOP) | failed |",
    ]


# Both ranks up to step 12, then, in new processes, from step 9 on.
BEFORE = parse("1.0 0 11 40\n1.1 1 11 41\n1.2 1 12 41\n1.3 0 12 40\n")
AFTER = parse("4.0 1 9 51\n4.5 0 9 50\n4.6 0 10 50\n")


def test_recovery_lasts_until_all_ranks_have_done_a_step() -> None:
    assert recovery(BEFORE + AFTER, failed_at=2.0) == Recovery(seconds=2.5, redone=4)
    assert recovery(BEFORE + AFTER[:1], failed_at=2.0) is None


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


HOST = [{"shape": "mlp", "depth": 4, "variant": PLAIN, "device": 1, "host": 1}]


def test_results_are_kept_and_reported_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    file.write_text(json.dumps({"host": {"machine": MACHINE, "records": HOST}}))
    assert BENCHMARK.main(["--parts", "", "--results", str(file)]) == 0
    assert "| plain Keras | 0.0 | 0.0 |" in capsys.readouterr().out
    assert BENCHMARK.parse([]).results == BENCHMARK.results
    assert BENCHMARK.parse(["--quick"]).results is None


def of_variant(framework: str, variant: str, processes: int = 2, **measured: object) -> dict:
    return {"framework": framework, "variant": variant, "processes": processes, **measured}


def test_steps_of_sharded_training() -> None:
    records = [
        of_variant("tfdist", "plain", 1, rows=2, samples_ms=[[80.0, 90.0]]),
        of_variant("tfdist", "plain", rows=2, samples_ms=[[100.0, 200.0]]),
        of_variant("tfdist", "sharded", rows=2, samples_ms=[[120.0, 220.0]]),
        of_variant("torch", "plain", 1, rows=2, samples_ms=[[80.0, 80.0]]),
        of_variant("torch", "plain", rows=2, samples_ms=[[100.0, 100.0]]),
        of_variant("torch", "sharded", rows=2, samples_ms=[[200.0, 200.0]]),
    ]
    assert sharded_tables.steps(records).splitlines() == [
        "2 sequences of 128 tokens a process:",
        "",
        "|  | 1 process, ms | 2 processes, ms | / plain | / PyTorch's | Drift |",
        "| --- | --: | --: | --: | --: | --: |",
        "| MultiWorkerMirroredStrategy | 85 (80-90) | 150 (100-200) |  | 1.50 | 2.00 |",
        "| FullyShardedStrategy |  | 170 (120-220) | 1.15 (1.10-1.20) | 0.85 | 1.83 |",
        "| PyTorch DDP | 80 (80-80) | 100 (100-100) |  |  | 1.00 |",
        "| PyTorch FSDP2 |  | 200 (200-200) | 2.00 (2.00-2.00) |  | 1.00 |",
    ]


def test_shares_are_compared_with_what_both_workers_could_do() -> None:
    def record(case: str, *milliseconds: float, rows: float = 0.5) -> dict:
        return {"model": "mlp", "case": case, "trials": [{"ms": list(milliseconds), "rows": rows}]}

    alike, equal, *_, automatic = share_trials.CASES
    records = [record(alike, 10.0, 10.0), record(equal, 20.0, 20.0), record(automatic, 14.0, 14.7, rows=0.33)]
    lines = share_trials.table_of(records).splitlines()[2:]
    assert [line.split(" | ")[2:] for line in lines] == [
        ["10 (10-10)", "1.00 (1.00-1.00)", "50%", "1.00 |"],
        ["20 (20-20)", "0.67 (0.67-0.67)", "50%", "1.00 |"],
        ["14 (14-15)", "0.93 (0.93-0.93)", "33%", "1.05 |"],
    ]


def test_efficiency_and_loss_of_local_steps() -> None:
    def record(link: str, case: str, *milliseconds: float, kilobytes: float = 0.0) -> dict:
        trial = {"ms": list(milliseconds), "bytes": [1e3 * kilobytes] * len(milliseconds)}
        return {"model": "mlp", "link": link, "case": case, "trials": [trial]}

    def lone(module: str, count: int, *milliseconds: float) -> dict:
        return {**record("", module, *milliseconds), "count": count}

    alike, local, *_, peer = local_speed.CASES
    lines = local_speed.table_of(
        [
            lone("keras_worker", 1, 5.0, 5.0),
            lone("keras_worker", 2, 10.0, 10.0),
            lone("torch_worker", 2, 8.0, 8.0),
            record("1g", alike, 40.0, 40.0, kilobytes=7000),
            record("1g", local, 10.0, 12.0, kilobytes=140),
            record("1g", peer, 16.0, 16.0, kilobytes=140),
        ]
    )
    assert [line.split(" | ")[3:] for line in lines.splitlines()[2:]] == [
        ["5.0 (5.0-5.0)", "2.00 (2.00-2.00)", "0.0", "1.00 |"],
        ["10.0 (10.0-10.0)", "1.00 (1.00-1.00)", "0.0", "1.00 |"],
        ["8.0 (8.0-8.0)", "1.00 (1.00-1.00)", "0.0", "1.00 |"],
        ["40.0 (40.0-40.0)", "0.25 (0.25-0.25)", "7000.0", "1.00 |"],
        ["11.0 (10.0-12.0)", "0.91 (0.91-0.91)", "140.0", "1.20 |"],
        ["16.0 (16.0-16.0)", "0.50 (0.50-0.50)", "140.0", "1.00 |"],
    ]
    trials = {0: [(0.5, 0.9), (0.7, 0.8), (0.4, 0.95)], 50: [(0.6, 0.85)]}
    losses = [
        {"task": "digits", "workers": 2, "period": period, "trials": [{"loss": x, "accuracy": y} for x, y in found]}
        for period, found in trials.items()
    ]
    assert local_loss.table_of(losses).splitlines()[2:] == [
        "| digits, CNN | 2 | each step | 0.5000 | 1.000 | 90.00% | +0.00 |",
        "| digits, CNN | 2 | 50 steps | 0.6000 | 1.200 | 85.00% | -5.00 |",
    ]


def test_bytes_and_memory_of_sharded_training() -> None:
    sent = [of_variant("tfdist", "plain", sent=320e6), of_variant("tfdist", "sharded", sent=460e6)]
    assert sharded_tables.sent(sent).splitlines()[2:] == [
        "| MultiWorkerMirroredStrategy | 320.0 | 1.00 |",
        "| FullyShardedStrategy | 460.0 | 1.44 |",
    ]

    def held(variant: str, shape: str, processes: int, *megabytes: int) -> dict:
        sizes = {kind: size * 10**6 for kind, size in zip(("held", "between", "peak"), megabytes, strict=True)}
        return of_variant("tfdist", variant, processes, shape=shape, **sizes)

    memory = [
        held("plain", "tiny", 2, 0, 500, 500),
        held("plain", "full", 2, 480, 1000, 1300),
        held("sharded", "tiny", 2, 0, 600, 600),
        held("sharded", "full", 4, 120, 730, 1000),
    ]
    assert sharded_tables.memory(memory).splitlines()[2:] == [
        "| MultiWorkerMirroredStrategy | 2 | 480 | 1.00 | 500 | 1.00 | 800 | 1.00 |",
        "| FullyShardedStrategy | 4 | 120 | 0.25 | 130 | 0.26 | 400 | 0.50 |",
    ]


def test_more_tokens_are_measured_only_if_asked_for() -> None:
    assert SHARDED.parse([]).parts == ["steps", "bytes", "memory"]
    assert SHARDED.parse(["--parts", "tokens"]).parts == ["tokens"]
