from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfdist.checkpoint.store import CheckpointStore

KILLS = 20
PROGRAM = Path(__file__).with_name("checkpoint_loop.py")
PACKAGE = Path(__file__).parents[2]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The program that forks writers; it and its writer are gone after the test, or after two minutes."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "TF_CPP_MIN_LOG_LEVEL": "2"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    deadline = threading.Timer(120, end)
    deadline.start()
    try:
        yield process
    finally:
        deadline.cancel()
        end()
        process.communicate()
        print((tmp_path / "log").read_text())


def kill_a_writer(program: subprocess.Popen[str], directory: Path, delay: float, after_first: bool) -> list[int]:
    """Starts a writer, kills it some time after its start or its first checkpoint; returns what it had written."""
    assert program.stdin is not None and program.stdout is not None
    print(directory, file=program.stdin, flush=True)
    pid = int(program.stdout.readline())
    lines = [program.stdout.readline()] if after_first else []
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    lines += iter(program.stdout.readline, "ended\n")
    return [int(line) for line in lines]


@pytest.mark.timeout(180)
def test_killed_writers_leave_loadable_checkpoints(program: subprocess.Popen[str], tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    generator = random.Random(seed)
    directory = tmp_path / "backup"
    killed_while_writing = 0
    last = 0
    for kill in range(KILLS):
        after_first = kill % 2 == 0
        written = kill_a_writer(program, directory, generator.uniform(0, 0.3), after_first)
        reader = CheckpointStore(str(directory), writer=False)
        names = reader.names()
        killed_while_writing += len(os.listdir(directory)) > len(names) if directory.exists() else 0
        last = max([last, *written])
        if not names:
            assert last == 0
            continue
        found = [reader.open(name) for name in names]
        numbers = [checkpoint.meta["number"] for checkpoint in found]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert last <= numbers[-1] <= last + 1, f"{last} was written, {numbers} are left"
        for checkpoint in found:
            for value in checkpoint.tensors.values():
                assert value.shape == (1_000_000,)
                assert (value == checkpoint.meta["number"]).all()
        last = numbers[-1]
    assert last >= KILLS / 2
    assert killed_while_writing >= KILLS / 5, "too few writers were killed in the middle of a checkpoint"
    store = CheckpointStore(str(directory))
    assert sorted(os.listdir(directory)) == store.names()
    assert len(store.names()) in (3, 4)
