from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.checkpointing import recovery_trial, table
from benchmarks.checkpointing.launchers import LAUNCHERS
from benchmarks.checkpointing.recovery import KILLS, STOP, Recovery, failures_of_run, recovery, victim
from benchmarks.checkpointing.saving import (
    ASYNCHRONOUS,
    KERAS,
    SAVINGS,
    SYNCHRONOUS,
    Sample,
    Saving,
    in_turns,
    ratios,
    windows_of,
)
from benchmarks.checkpointing.step_log import Step, StepReader, StepWriter, parse, stop_after
from benchmarks.checkpointing.training import MODEL, state_bytes
from benchmarks.data_parallel.models import count_parameters


def test_state_has_31_megabytes() -> None:
    assert state_bytes(count_parameters(MODEL)) == 31_246_200


def test_windows_are_whole_intervals_and_saves_are_not_at_their_borders() -> None:
    for saving in SAVINGS:
        windows = windows_of(saving)
        assert windows.steps % saving.every == 0
        assert saving.every == 1 or windows.warmup % saving.every
        assert windows.total_steps == windows.warmup + windows.windows * windows.steps + 1


def test_every_backup_is_measured_between_trainings_without() -> None:
    turns = list(in_turns(SAVINGS, rounds=3))
    assert turns[::2] == [None] * (3 * len(SAVINGS) + 1)
    assert turns[1::2] == [*SAVINGS] * 3


def test_ratios_are_to_the_trainings_before_and_after() -> None:
    saving = Saving(SYNCHRONOUS, 8)
    samples = [
        Sample(None, [10.0]),
        Sample(saving, [30.0, 15.0]),
        Sample(None, [20.0]),
        Sample(saving, [60.0]),
        Sample(None, [40.0]),
    ]
    assert ratios(samples) == {saving: [2.0, 1.0, 2.0]}


def test_overhead_table() -> None:
    without = Sample(None, [20.0, 22.0, 30.0])
    samples = [without, Sample(Saving(ASYNCHRONOUS, 1), [33.0, 44.0], written=0.3), without]
    samples += [Sample(Saving(KERAS, 8), [22.0]), without]
    assert table.overhead_table(samples) == (
        "| Backup | every step | every 8 steps | every 64 steps | Written at every step |\n"
        "| --- | --: | --: | --: | --: |\n"
        "| tfdist, asynchronous | 1.75 (1.50-2.00) | failed | failed | 30% |\n"
        "| tfdist, synchronous | failed | failed | failed |  |\n"
        "| keras.callbacks.BackupAndRestore | failed | 1.00 (1.00-1.00) | failed |  |\n"
        "\n"
        "Without backups a step takes 22.0 ms (20.0-30.0)."
    )


def test_recovery_table() -> None:
    worker, chief = KILLS
    runs = [(worker, Recovery(3.0, 4)), (chief, Recovery(2.5, 1)), (worker, Recovery(4.0, 6))]
    assert table.recovery_table({"tfdist": runs, "torchrun": []}) == (
        "| Failure | tfdist run | torchrun, PyTorch DDP (gloo) |\n"
        "| --- | --: | --: |\n"
        "| worker killed | 3.5 s (3.0-4.0), 5 steps | failed |\n"
        "| chief killed | 2.5 s (2.5-2.5), 1 step | failed |\n"
        "| worker stopped (SIGSTOP) | failed | failed |"
    )


def test_a_run_has_each_kill_as_often_as_asked_and_one_stop() -> None:
    assert failures_of_run(2) == [*KILLS, *KILLS, STOP]


# Both ranks up to step 12, then, in new processes, from step 9 on.
BEFORE = parse("1.0 0 11 40\n1.1 1 11 41\n1.2 1 12 41\n1.3 0 12 40\n")
AFTER = parse("4.0 1 9 51\n4.5 0 9 50\n4.6 0 10 50\n")


def test_recovery_lasts_until_all_ranks_have_done_a_step() -> None:
    assert recovery(BEFORE + AFTER, failed_at=2.0) == Recovery(seconds=2.5, redone=4)
    assert recovery(BEFORE + AFTER[:1], failed_at=2.0) is None


def test_what_the_old_processes_still_do_is_no_recovery() -> None:
    late = [Step(2.1, 0, 13, 40)]
    assert recovery(BEFORE + late, failed_at=2.0) is None
    assert recovery(BEFORE + late + AFTER, failed_at=2.0) == Recovery(seconds=2.5, redone=5)


def test_a_process_fails_when_all_are_between_two_saves() -> None:
    assert victim(BEFORE, rank=1, not_before=1.0) == Step(1.2, 1, 12, 41)
    assert victim(BEFORE, rank=0, not_before=1.0) == Step(1.3, 0, 12, 40)
    assert victim(BEFORE[:3], rank=1, not_before=1.0) is None, "rank 0 is one step behind"
    assert victim(BEFORE[:2], rank=1, not_before=1.0) is None, "just before a save"
    assert victim(BEFORE, rank=1, not_before=5.0) is None
    assert victim([], rank=1, not_before=0.0) is None


def test_log_of_steps(tmp_path: Path) -> None:
    reader = StepReader(tmp_path)
    assert reader.read() == []
    writers = [StepWriter(str(tmp_path), rank) for rank in range(2)]
    began = time.monotonic()
    assert [writer.write(7) for writer in writers] == [False, False]
    assert [step[1:] for step in reader.read()] == [(0, 7, os.getpid()), (1, 7, os.getpid())]
    assert all(abs(step.time - began) < 5 for step in reader.steps)
    stop_after(tmp_path, 9)
    assert [writers[1].write(8), writers[1].write(9)] == [False, True]
    assert [step.step for step in reader.read()] == [7, 7, 8, 9]


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    (tmp_path / "steps").write_text("1.0 0 1 40\n1.1 1 1 4")
    reader = StepReader(tmp_path)
    assert reader.read() == [Step(1.0, 0, 1, 40)]
    with (tmp_path / "steps").open("a") as file:
        file.write("1\n")
    assert reader.read() == [Step(1.0, 0, 1, 40), Step(1.1, 1, 1, 41)]


def test_launchers_save_equally_often_and_wait_equally_long(tmp_path: Path) -> None:
    words = {name: launcher.words(tmp_path) for name, launcher in LAUNCHERS.items()}
    assert all(line[0] == sys.executable for line in words.values())
    assert words["tfdist"][-3:-1] == [str(tmp_path), "8"]
    assert words["torchrun"][-4:-2] == [str(tmp_path), "8"]
    assert words["tfdist"][words["tfdist"].index("--hang-timeout") + 1] == words["torchrun"][-1] == "2"
    assert set(words["tfdist"]) ^ set(words["tfdist-cold"]) == {"--warm", "--no-warm"}
    assert len({line[line.index("--max-restarts") + 1] for line in words.values()}) == 1


def test_saboteur_kills_and_sees_the_recovery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[tuple[int, int]] = []
    log = tmp_path / "steps"

    def train(first_pid: int, step: int) -> None:
        now = time.monotonic()
        with log.open("a") as file:
            file.write("".join(f"{now:.4f} {rank} {step} {first_pid + rank}\n" for rank in range(2)))

    def kill(pid: int, number: int) -> None:
        killed.append((pid, number))
        # From another thread, and after the time of the failure has been taken.
        threading.Timer(0.05, train, (100 * (len(killed) + 1), 12)).start()

    monkeypatch.setattr(recovery_trial.os, "kill", kill)
    train(100, 12)
    with recovery_trial.Saboteur(tmp_path, recovery_trial.Schedule(1, settle=0.0, between=-1.0)) as saboteur:
        end = time.monotonic() + 20
        while not (tmp_path / "stop-after").exists() and time.monotonic() < end:
            time.sleep(0.01)
    assert killed == [(101, signal.SIGKILL), (200, signal.SIGKILL), (301, signal.SIGSTOP)]
    assert [found.redone for _, found in saboteur.recoveries] == [1, 1, 1]
    assert all(0.05 <= found.seconds < 5 for _, found in saboteur.recoveries)
    assert (tmp_path / "stop-after").read_text() == "36"
