from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path

import pytest

from tests.processes import forked
from tfdist.checkpoint.store import CheckpointStore

KILLS = 8
PROGRAM = Path(__file__).with_name("checkpoint_loop.py")


def written(log: Path) -> list[int]:
    return [int(line) for line in re.findall(r"^(\d+)\n", log.read_text(), re.MULTILINE)]


def killed_writer(directory: Path, log: Path, delay: float) -> int:
    """Kills a writer some time after its first checkpoint; returns the last number that it had written."""
    process = forked([str(PROGRAM), str(directory)], log, log.parent, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})
    try:
        end = time.monotonic() + 60
        while not written(log) and process.poll() is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(delay)
    finally:
        process.kill()
    assert process.wait(30) == -9, log.read_text()
    return written(log)[-1]


@pytest.mark.timeout(180)
def test_killed_writers_leave_loadable_checkpoints(tmp_path: Path) -> None:
    generator = random.Random(seed := random.SystemRandom().randrange(2**32))
    print(f"seed {seed}")
    killed_while_writing = 0
    for kill in range(KILLS):
        last = killed_writer(tmp_path / "backup", tmp_path / f"log-{kill}", generator.uniform(0, 0.3))
        reader = CheckpointStore(tmp_path / "backup", writer=False)
        names = reader.names()
        killed_while_writing += len(os.listdir(reader.directory)) > len(names)
        found = [reader.open(name) for name in names]
        numbers = [checkpoint.meta["number"] for checkpoint in found]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert last <= numbers[-1] <= last + 1, f"{last} was written, {numbers} are left"
        for checkpoint in found:
            assert all((value == checkpoint.meta["number"]).all() for value in checkpoint.tensors.values())
    assert killed_while_writing, "no writer was killed in the middle of a checkpoint"
    store = CheckpointStore(tmp_path / "backup")
    assert sorted(os.listdir(store.directory)) == store.names()
    assert len(store.names()) in (3, 4)
