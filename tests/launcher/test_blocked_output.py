"""What the launcher writes waits: for a reader, or for a disk. Signals and deadlines do not."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.conftest import Launch
from tfdist.launcher import output
from tfdist.launcher.output import Writer, write_all

# The process that is named prints more than all pipes and queues hold. All go on printing until they are stopped.
CHATTY = """
    def save(*_):
        Path(f"saved-{name}").touch()
        os._exit(77)
    signal.signal(signal.SIGTERM, save)
    for number in range(60 if name in sys.argv else 1):
        print("x" * 65535)
    Path(name).touch()
    while True:
        print("y" * 1000)
        time.sleep(0.01)
"""
WORKERS = ("worker-0", "worker-1")
# Some seconds are waited for whoever might read.
DEADLINE = 60.0


@pytest.fixture
def unread() -> Iterator[int]:
    """A pipe that is full, and that nobody reads."""
    reading, writing = os.pipe()
    fill(writing)
    yield writing
    os.close(reading)
    os.close(writing)


def fill(pipe: int) -> None:
    os.set_blocking(pipe, False)
    try:
        while True:
            os.write(pipe, b"." * 4096)
    except BlockingIOError:
        os.set_blocking(pipe, True)


def is_stopped(started: Launch, folder: Path) -> str:
    """SIGTERM is passed on, all save, and the exit code says so; returns what the launcher has said."""
    started.wait_for_file(*WORKERS, deadline=DEADLINE)
    started.popen.send_signal(signal.SIGTERM)
    result = started.finish(DEADLINE)
    assert result.code == 77
    assert {path.name for path in folder.glob("saved-*")} == {f"saved-{name}" for name in WORKERS}
    started.assert_nothing_is_left()
    return result.err


def test_standard_output_that_nobody_reads(launch, tmp_path: Path, unread: int) -> None:
    said = is_stopped(launch(CHATTY, arguments=["worker-0"], stdout=unread), tmp_path)
    assert "SIGTERM received and passed on to 2 processes" in said
    assert re.search(r"tfdist: \d+ bytes of the output were not shown: nobody reads it", said)
    (log,) = tmp_path.glob("tfdist-logs/*/worker-0.log")
    assert log.read_bytes().count(b"x") == 60 * 65535  # all of it


@pytest.mark.parametrize("is_full", [False, True], ids=["without a reader", "full"])
def test_events_in_a_pipe(launch, tmp_path: Path, is_full: bool) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    os.mkfifo(logs / "events.jsonl")
    end = os.open(logs / "events.jsonl", os.O_RDWR) if is_full else None
    if end is not None:
        fill(end)
    said = is_stopped(launch(CHATTY, "--log-dir", "logs"), tmp_path)
    assert "tfdist: events.jsonl in logs/ is not complete: " in said
    if end is not None:
        os.close(end)


def test_logs_that_cannot_be_opened(launch, tmp_path: Path) -> None:
    """As in a folder of a network file system that does not answer: who opens a file there, waits."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for index in (0, 1):
        os.mkfifo(logs / f"worker-{index}.log")
    said = is_stopped(launch(CHATTY, "--log-dir", "logs", arguments=["worker-1"]), tmp_path)
    assert re.search(r"tfdist: \d+ bytes are missing in the logs in logs/: nobody reads it, or its disk", said)


LAUNCH = """
import sys, tfdist
def train():
    import os, signal, time
    from pathlib import Path
    name = f"worker-{tfdist.discover().rank}"
    def save(*_):
        Path(f"saved-{name}").touch()
        os._exit(77)
    signal.signal(signal.SIGTERM, save)
    Path(name).touch()
    while True:
        print("x" * 65535)
try:
    tfdist.launch(train, workers=2)
finally:
    print(type(sys.exc_info()[1]).__name__, file=sys.stderr, flush=True)
"""


@pytest.mark.nightly
def test_launch_while_nobody_reads(launches: list[Launch], tmp_path: Path, unread: int) -> None:
    launches.append(started := Launch(tmp_path, [sys.executable, "-c", LAUNCH], stdout=unread))
    started.wait_for_file("worker-0", "worker-1", deadline=DEADLINE)
    started.popen.send_signal(signal.SIGTERM)
    result = started.finish(DEADLINE)
    assert result.code == -signal.SIGTERM  # as if nothing had waited
    assert {path.name for path in tmp_path.glob("saved-*")} == {"saved-worker-0", "saved-worker-1"}
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_slow_reader_gets_all(launch, tmp_path: Path) -> None:
    """Who prints is made to wait, as it would be for a slow terminal: nothing is dropped as long as it moves."""
    started = launch("for number in range(500): print(f'{number:08}' * 1000)", "-n", "1")
    total = 0
    assert started.popen.stdout is not None
    while data := os.read(started.popen.stdout.fileno(), 1 << 16):
        total += data.count(b"\n")
    assert total == 500
    assert "not shown" not in started.finish().err


@pytest.mark.nightly
def test_a_pipe_that_does_not_wait(launch, tmp_path: Path) -> None:
    """Some programs leave their end of a pipe non-blocking: Node.js, ssh."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    started = launch("for number in range(300): print('x' * 9999)", "-n", "1", stdout=writing)
    os.close(writing)
    data = b""
    while more := os.read(reading, 1 << 16):
        data += more
    os.close(reading)
    assert (data.count(b"x"), started.finish().code) == (300 * 9999, 0)


@pytest.mark.parametrize(
    ("closed", "is_shown"),
    [
        (">&-", False),
        pytest.param("2>&-", True, marks=pytest.mark.nightly),
        pytest.param("<&- >&- 2>&-", False, marks=pytest.mark.nightly),
    ],
)
def test_closed_streams(launch, closed: str, is_shown: bool) -> None:
    script = "print('out', flush=True); print(sorted(os.listdir('/proc/self/fd')))"
    started = launch(script, command=["sh", "-c", f"{sys.executable} -m tfdist run -n 2 script.py {closed}"])
    result = started.finish()
    assert (result.code, "Traceback" in result.err) == (0, False)
    lines = ["out", "['0', '1', '2', '3']"]
    assert [started.log(f"worker-{index}").splitlines() for index in (0, 1)] == [lines] * 2
    assert result.out.splitlines() == [f"[worker 0] {line}" for line in lines if is_shown]


def test_what_still_waits_at_the_end_is_counted(launch, unread: int) -> None:
    """Less than what is dropped at once: it waits for a reader, until the run ends without one."""
    result = launch("print('x' * 1000)", "-n", "1", stdout=unread).finish(DEADLINE)
    assert result.code == 0
    said = re.search(r"tfdist: (\d+) bytes of the output were not shown: nobody reads it", result.err)
    assert said and int(said[1]) >= 1000


def test_what_was_not_written_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_PATIENCE", 0.0)
    writer, may_go_on = Writer(), threading.Event()
    writer.do(3, may_go_on.wait)
    writer.do(4, int)
    writer.close()
    assert (writer.dropped, writer.problem) == (7, "nobody reads it, or its disk does not answer")
    writer.close()
    assert writer.dropped == 7
    may_go_on.set()


def test_a_slow_reader_is_not_a_stuck_one() -> None:
    reading, writing = os.pipe()
    text, moved, read = os.urandom(1 << 18), [], []
    reader = threading.Thread(target=lambda: read.extend(iter(lambda: os.read(reading, 1 << 14), b"")))
    reader.start()
    write_all(writing, text, lambda: moved.append(True))
    os.close(writing)
    reader.join(DEADLINE)
    os.close(reading)
    assert b"".join(read) == text
    assert len(moved) > 2  # each piece that the reader has made room for
