from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.data_parallel import peers, processes, table, trial
from benchmarks.data_parallel.measure import StepClock, Summary, efficiency, relative_time
from benchmarks.data_parallel.models import MODELS, count_parameters
from benchmarks.data_parallel.workload import Workload


def test_step_clock_leaves_out_the_warmup() -> None:
    time_of_step = {5: 100.0, 15: 100.2, 25: 100.3}
    done = 0
    clock = StepClock(warmup=5, windows=2, steps=10, now=lambda: time_of_step[done])
    for done in range(1, 40):
        clock.tick(done)
    assert clock.milliseconds() == pytest.approx([20.0, 10.0])


def test_step_clock_of_a_training_that_is_too_short() -> None:
    clock = StepClock(warmup=5, windows=2, steps=10, now=lambda: 0.0)
    for done in range(1, 20):
        clock.tick(done)
    with pytest.raises(RuntimeError, match=r"2 of 3 boundaries of windows were seen; expected all"):
        clock.milliseconds()


@pytest.mark.parametrize("steps_per_execution", [1, 10])
def test_training_is_long_enough_for_all_windows(steps_per_execution: int) -> None:
    workload = Workload("mlp", 2, warmup=20, windows=3, steps=10, steps_per_execution=steps_per_execution)
    ticks = iter(range(1000))
    clock = StepClock(workload.warmup, workload.windows, workload.steps, now=lambda: next(ticks))
    for done in range(steps_per_execution, workload.total_steps + 1, steps_per_execution):
        clock.tick(done)
    assert clock.milliseconds() == [100.0, 100.0, 100.0]


def test_summary_and_ratios() -> None:
    one, two = Summary.of([[4.0, 5.0], [9.0]]), Summary.of([[10.0], [8.0, 30.0]])
    assert one == Summary(median=5.0, lowest=4.0, highest=9.0, drift=1.125)
    assert efficiency(one, two) == 0.5
    assert relative_time(two, one) == 2.0


def test_drift_shows_a_training_that_had_not_settled() -> None:
    assert Summary.of([[30.0, 31.0, 17.0, 16.0]]).drift == 16.5 / 30.5
    # Several trainings: not what differs between them, but what changes within each.
    assert Summary.of([[5.0, 5.0], [9.0, 9.0], [7.0, 7.0]]).drift == 1.0
    # The middle one of an odd number is in both halves.
    assert Summary.of([[8.0, 6.0, 4.0]]).drift == 5.0 / 7.0


def test_sizes_of_the_models() -> None:
    assert {name: count_parameters(model) for name, model in MODELS.items()} == {"cnn": 56_266, "mlp": 1_863_690}


def test_workload_travels_as_json() -> None:
    workload = Workload("cnn", 2, compression="bf16")
    assert Workload.from_json(workload.to_json()) == workload
    assert workload.global_batch == 128


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": "rnn"}, "model 'rnn': expected one of cnn, mlp"),
        ({"windows": 0}, "windows 0: expected at least 1"),
        ({"warmup": 15, "steps_per_execution": 10}, "warmup 15: expected a multiple of 10"),
    ],
)
def test_wrong_workloads(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(**{"model": "mlp", "processes": 1, **settings})


def rows_of(*names: str, variants: tuple[str, ...] = ("bf16", "spe10")) -> list[peers.Row]:
    return peers.make_rows(names, variants, Workload("mlp", 1))


def test_trials_take_turns_and_none_runs_twice_in_a_round() -> None:
    turns = list(peers.in_turns(rows_of("tfdist", "torch"), rounds=2))
    described = [
        (number, t.peer, t.workload.processes, t.workload.steps_per_execution, t.workload.compression)
        for number, t in turns
    ]
    one_round = [
        ("tfdist", 1, 1, None),
        ("tfdist", 2, 1, None),
        ("tfdist", 2, 1, "bf16"),
        ("tfdist", 1, 10, None),
        ("tfdist", 2, 10, None),
        ("torch", 1, 1, None),
        ("torch", 2, 1, None),
    ]
    assert described == [(number, *this) for number in range(2) for this in one_round]


def test_a_peer_that_is_not_installed_is_left_out_with_a_reason() -> None:
    available, reasons = peers.split_available(["tfdist", "tf_keras", "torch"], lambda package: package == "tfdist")
    assert available == ["tfdist"]
    assert reasons == [
        "tf_keras, tf.distribute is left out: tf_keras is not installed. Install it by `pip install tf_keras`.",
        "PyTorch DDP (gloo) is left out: torch is not installed. Install it by `pip install torch`.",
    ]
    assert not peers.installed("a_package_that_does_not_exist")
    available, reasons = peers.variants_available(["bf16", "horovod"], lambda package: package != "horovod")
    assert available == ["bf16"]
    assert reasons == ["tfdist, --transport horovod is left out: Horovod is not installed. See docs/horovod.md."]


def test_table() -> None:
    rows = rows_of("tfdist", "torch", variants=())
    samples = {rows[0].one: [[6.0, 7.0], [8.0]], rows[0].two: [[10.0]], rows[1].one: [[5.0]], rows[1].two: [[12.5]]}
    assert table.as_markdown(table.as_records(rows, samples)) == (
        "MLP, 1,863,690 parameters:\n\n"
        "| Framework | 1 process, ms | 2 processes, ms | Efficiency | Time / tfdist's | Drift |\n"
        "|---|--:|--:|--:|--:|--:|\n"
        "| tfdist | 7.00 (6.00-8.00) | 10.00 (10.00-10.00) | 70% | 1.00 | 1.00 |\n"
        "| PyTorch DDP (gloo) | 5.00 (5.00-5.00) | 12.50 (12.50-12.50) | 40% | 1.25 | 1.00 |"
    )


def test_variants_are_compared_with_the_defaults() -> None:
    rows = rows_of("tfdist")
    samples = {row.two: [[milliseconds]] for row, milliseconds in zip(rows, (10.0, 8.0, 5.0), strict=True)}
    assert [record["relative_time"] for record in table.as_records(rows, samples)] == [1.0, 0.8, 0.5]


def test_what_failed_or_was_not_measured_has_no_ratio() -> None:
    rows = rows_of("torch")
    records = table.as_records(rows, {rows[0].one: [[5.0]], rows[0].two: []})
    assert records[0]["efficiency"] is None
    assert records[0]["relative_time"] is None
    assert "| PyTorch DDP (gloo) | 5.00 (5.00-5.00) | failed |  |  |  |" in table.as_markdown(records)


SETTING = trial.Setting(cores=(2, 5), deadline=1.0, environ={"A": "b"})


def commands_of(peer: str, processes: int) -> tuple[processes.Command, ...]:
    this = peers.Trial(peer, Workload("mlp", processes))
    return trial.make_commands(this, SETTING, [20001, 20002], Path("/r.json"), Path("/logs"))


def test_one_process_has_the_first_core() -> None:
    (command,) = commands_of("torch", 1)
    assert command.words[:3] == (sys.executable, "-m", "benchmarks.data_parallel.torch_worker")
    assert (command.cores, command.env) == ((2,), {"A": "b"})


def test_tfdist_is_started_by_its_launcher() -> None:
    (command,) = commands_of("tfdist", 2)
    assert command.words[1:8] == ("-m", "tfdist", "run", "-n", "2", "--cpus-per-worker", "1")
    assert command.cores == (2, 5)


def test_peers_are_told_their_rank() -> None:
    stock = commands_of("tf_keras", 2)
    configs = [json.loads(command.env["TF_CONFIG"]) for command in stock]
    assert [config["task"] for config in configs] == [{"type": "worker", "index": 0}, {"type": "worker", "index": 1}]
    assert configs[1]["cluster"] == {"worker": ["127.0.0.1:20001", "127.0.0.1:20002"]}
    torch = commands_of("torch", 2)
    assert [command.env["RANK"] for command in torch] == ["0", "1"]
    assert {command.env["MASTER_PORT"] for command in torch} == {"20001"}
    assert [command.cores for command in torch] == [(2,), (5,)]


def test_environment_has_no_cluster_and_one_thread() -> None:
    environ = trial.make_environ({"TF_CONFIG": "{}", "HOME": "/h", "OMP_NUM_THREADS": "8"}, {"EXTRA": "1"})
    assert "TF_CONFIG" not in environ
    assert (environ["HOME"], environ["EXTRA"], environ["OMP_NUM_THREADS"]) == ("/h", "1", "1")


def python(code: str) -> processes.Command:
    return processes.Command((sys.executable, "-c", code), dict(os.environ), tuple(os.sched_getaffinity(0)))


def test_a_failure_ends_the_other_process_and_shows_its_log(tmp_path: Path) -> None:
    waits = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    fails = "import time; time.sleep(0.5); print('went wrong'); raise SystemExit(3)"
    begin = time.monotonic()
    with pytest.raises(processes.TrialError, match=r"(?s)process 1 ended with 3; expected 0.*went wrong"):
        processes.run_together([python(waits), python(fails)], tmp_path, deadline=30)
    assert time.monotonic() - begin < 20
    pid = int((tmp_path / "log-0").read_text().split()[1])
    assert not Path(f"/proc/{pid}").exists()


def test_deadline_kills_what_ignores_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.2)
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('pid', os.getpid(), flush=True); time.sleep(60)"
    )
    with pytest.raises(processes.TrialError, match=r"not done after 1\.5 s; expected less"):
        processes.run_together([python(stubborn)], tmp_path, deadline=1.5)
    pid = int((tmp_path / "log-0").read_text().split()[1])
    assert not Path(f"/proc/{pid}").exists()


def test_processes_are_pinned(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    command = processes.Command(
        (sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"), dict(os.environ), (core,)
    )
    processes.run_together([command], tmp_path, deadline=30)
    assert (tmp_path / "log-0").read_text() == f"[{core}]\n"


def test_milliseconds_are_finite_in_json() -> None:
    record = table.as_records(rows_of("tfdist"), {rows_of("tfdist")[0].two: [[1.0]]})[0]
    assert math.isfinite(json.loads(json.dumps(record))["two"]["median"])
