"""Progress: what a process reports is what the launcher reads, whatever happens to either."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from tfdist.supervision.progress import (
    SAVING,
    STARTING,
    TRAINING,
    VARIABLE,
    ProgressFile,
    ProgressWriter,
)


def place_of(file: ProgressFile) -> str:
    return file.value.rpartition(":")[0]


def test_a_report_is_read() -> None:
    with ProgressFile() as file:
        writer = ProgressWriter(file.value)
        before = time.monotonic()
        writer.report(TRAINING, 41)
        writer.report(SAVING, 42)
        progress = file.read()
        assert progress is not None
        assert (progress.reports, progress.phase, progress.step, progress.resumed_step) == (2, "saving", 42, None)
        assert before <= progress.time <= time.monotonic()
        assert (writer.phase, writer.step) == ("saving", 42)


def test_who_waits_is_as_silent_as_before() -> None:
    with ProgressFile() as file:
        writer = ProgressWriter(file.value)
        writer.waits("start fit")  # outside of a fit nobody watches
        assert file.read() is None
        writer.report(TRAINING, 41)
        before = file.read()
        writer.waits("finish the epoch")
        waiting = file.read()
        assert before is not None and waiting is not None
        assert (waiting.phase, waiting.step, waiting.waits_to) == (TRAINING, 41, "finish the epoch")
        assert waiting.time == before.time
        writer.waits()
        assert file.read().waits_to == ""  # type: ignore[union-attr]
        writer.waits("\u00e4" * 100)
        writer.report(TRAINING, 42)
        assert (file.read().step, file.read().waits_to) == (42, "")  # type: ignore[union-attr]


def test_resumption_is_kept_and_claimed_once() -> None:
    with ProgressFile() as file:
        writer = ProgressWriter(file.value)
        writer.resumed(120)
        progress = file.read()
        assert progress is not None
        assert (progress.phase, progress.step, progress.resumed_step) == (STARTING, 120, 120)
        writer.report(TRAINING, 121)
        assert file.read().resumed_step == 120  # type: ignore[union-attr]
        assert [writer.claim_resumption(), writer.claim_resumption()] == [120, None]
        # The next fit is another one.
        writer.resumed(120)
        writer.begin()
        assert (file.read().step, file.read().resumed_step) == (0, None)  # type: ignore[union-attr]
        assert writer.claim_resumption() is None


@pytest.mark.parametrize("content", [None, b"too short", "a pipe"])
def test_a_file_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: object) -> None:
    """To open a pipe for reading and writing would keep its reader from seeing the end."""
    path = tmp_path / "progress"
    if content == "a pipe":
        os.mkfifo(path)
    elif content is not None:
        path.write_bytes(content)
    for value in (path, f"{path}:tfdist-progress-0123456789abcdef"):
        monkeypatch.setenv(VARIABLE, str(value))
        assert ProgressWriter.from_environment() is None


def impostors(folder: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Files that another program may have open where a launcher had its memory, each with a way to read it."""
    content = b"of another program" * 20
    plain = folder / "file"
    plain.write_bytes(content)
    with open(plain, "r+b") as file:
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}", plain.read_bytes
    for name in ("other", "tfdist-progress-0123456789abcdef"):
        memory = os.memfd_create(name)
        os.write(memory, content)
        yield f"/proc/{os.getpid()}/fd/{memory}", functools.partial(os.pread, memory, 1000, 0)
        os.close(memory)


def test_another_program_that_has_got_the_launchers_number_keeps_its_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ProgressFile() as gone:
        name = gone.value.rpartition(":")[2]
    for path, read in impostors(tmp_path):
        before = read()
        for value in (path, f"{path}:{name}"):
            monkeypatch.setenv(VARIABLE, value)
            writer = ProgressWriter.from_environment()
            if writer is not None:
                writer.report(TRAINING, 1)
            assert read() == before and writer is None


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(st.tuples(st.integers(0, 103), st.binary(min_size=1, max_size=104)), max_size=4))
def test_whatever_is_in_the_memory_is_a_report_or_none(writes: list[tuple[int, bytes]]) -> None:
    with ProgressFile() as file, open(place_of(file), "r+b", buffering=0) as raw:
        ProgressWriter(file.value).report(TRAINING, 7)
        for place, content in writes:
            os.pwrite(raw.fileno(), content[: 104 - place], place)
        found = file.read()
        assert found is None or (isinstance(found.phase, str) and isinstance(found.step, int))


def test_reports_survive_sigkill_and_leave_no_file() -> None:
    code = (
        "import os, signal\nfrom tfdist.supervision.progress import ProgressWriter\n"
        "writer = ProgressWriter.from_environment()\n"
        "for step in range(1, 1001): writer.report('training', step)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    with ProgressFile() as file:
        env = {**os.environ, VARIABLE: file.value}
        ended = subprocess.run([sys.executable, "-c", code], env=env, timeout=60)
        assert ended.returncode == -signal.SIGKILL
        progress = file.read()
        assert progress is not None
        assert (progress.step, progress.reports) == (1000, 1000)
    assert not os.path.exists(place_of(file))


@pytest.mark.parametrize("written", [0, 8, 96])
@pytest.mark.parametrize("rest", ["zeros", "the first report"])
def test_a_writer_that_is_stopped_in_the_middle(written: int, rest: str) -> None:
    """Its second report is read: the time of a torn one may be 0, and a process without news since then has failed."""
    size, states = 100, []
    with ProgressFile() as file, open(place_of(file), "r+b", buffering=0) as raw:
        writer = ProgressWriter(file.value)
        for step in (40, 41, 42):
            writer.report(TRAINING, step)
            states.append(os.pread(raw.fileno(), 2 * size, 0))
        _, before, after = states
        # The third report is where the first one was: in the second half.
        torn = bytes(size - written) if rest == "zeros" else before[size + written :]
        raw.write(before[:size] + after[size : size + written] + torn)
        progress = file.read()
    assert progress is not None
    assert (progress.reports, progress.step, progress.phase) == (2, 41, TRAINING)
