from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from tests.processes import forked
from tfdist.checkpoint.store import CheckpointStore

PROGRAM = Path(__file__).with_name("checkpoint_loop.py")
# In the middle of which checkpoint of its process; or how many seconds after the first one, at any moment.
KILLS = [("tensors", "2"), 0.0, ("manifest", "3"), 0.05, ("tensors", "4"), 0.1, ("manifest", "2"), 0.2]
_SECONDS = 120.0


def written(log: Path) -> list[int]:
    return [int(line) for line in re.findall(r"^(\d+)\n", log.read_text(), re.MULTILINE)]


def killed_writer(directory: Path, log: Path, kill: tuple[str, str] | float) -> int:
    """Runs a writer until it kills itself, or is killed; returns the last number that it had written."""
    words = [str(PROGRAM), str(directory), *(kill if isinstance(kill, tuple) else ())]
    process = forked(words, log, log.parent, {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"})
    try:
        if isinstance(kill, tuple):
            process.wait(_SECONDS)
        else:
            end = time.monotonic() + _SECONDS
            while not written(log) and process.poll() is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(kill)
    finally:
        process.kill()
    assert process.wait(_SECONDS) == -9, log.read_text()
    return written(log)[-1]


@pytest.mark.timeout(1200)
def test_killed_writers_leave_loadable_checkpoints(tmp_path: Path) -> None:
    for number, kill in enumerate(KILLS):
        last = killed_writer(tmp_path / "backup", tmp_path / f"log-{number}", kill)
        reader = CheckpointStore(tmp_path / "backup", writer=False)
        names = reader.names()
        if isinstance(kill, tuple):
            assert len(os.listdir(reader.directory)) > len(names), "it was killed in the middle of a checkpoint"
        found = [reader.open(name) for name in names]
        numbers = [checkpoint.meta["number"] for checkpoint in found]
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert last <= numbers[-1] <= last + 1, f"{last} was written, {numbers} are left"
        for checkpoint in found:
            assert all((value == checkpoint.meta["number"]).all() for value in checkpoint.tensors.values())
    store = CheckpointStore(tmp_path / "backup")
    assert sorted(os.listdir(store.directory)) == store.names()
    assert len(store.names()) in (3, 4)
