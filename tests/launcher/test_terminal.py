"""The launcher on a real (pseudo-)terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import termios
import time
from collections.abc import Callable

from tests.launcher.conftest import DEADLINE

COLUMNS = 60


def read_all(outer: int, note: Callable[[str], object]) -> str:
    """What is written to a terminal until nobody has it open any more; `note` gets what there is so far."""
    text, end = b"", time.monotonic() + DEADLINE
    while time.monotonic() < end:
        if select.select([outer], [], [], 0.1)[0]:
            try:
                text += os.read(outer, 65536)
            except OSError:
                return text.decode()
            note(visible(text.decode(errors="replace")))
    raise AssertionError(f"the terminal stayed open; so far: {text!r}")


def on_terminal(launch, script: str, note: Callable[[str], object] = str, **env: str) -> tuple[int, str]:
    outer, inner = os.openpty()
    try:
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 25, COLUMNS, 0, 0))
        env = {"TERM": "xterm", "COLUMNS": "", "LINES": "", **env}
        started = launch(script, stdin=inner, stdout=inner, stderr=inner, env=env)
        os.close(inner)
        inner = -1
        text = read_all(outer, note)
        return started.finish().code, text
    finally:
        os.close(outer)
        if inner >= 0:
            with contextlib.suppress(OSError):
                os.close(inner)


def visible(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def final_state(row: str) -> str:
    """What is left of a row after the last time it was erased."""
    return row.split("\r\x1b[K")[-1]


KERAS_BAR = """
    print("Epoch 1/1")
    previous = 0
    for step in range(1, 21):
        text = f"{step}/20 " + "━" * step + "─" * (20 - step) + f" loss: {1 / step:.4f} - accuracy: {step / 20:.4f}"
        print("\\b" * previous + "\\r" + f"\\x1b[32m{text}\\x1b[0m", end="\\n" if step == 20 else "", flush=True)
        previous = len(text)
        while step <= 5 and not Path(f"seen-{step}").exists(): time.sleep(0.01)
"""


def test_progress_bar_stays_one_live_line(launch, tmp_path) -> None:
    def note(text: str) -> None:
        for step in re.findall(r"\] (\d)/20 ", text):
            (tmp_path / f"seen-{step}").touch()

    code, text = on_terminal(launch, KERAS_BAR, note)
    assert code == 0
    announcement, epoch, bar, rest = text.split("\r\n")
    assert announcement.startswith("tfdist: 2 workers on this machine")
    assert visible(final_state(epoch)) == "[worker 0] Epoch 1/1"
    assert rest == ""
    states = [visible(state) for state in bar.split("\r\x1b[K")]
    assert len(states) >= 5  # those that the script has waited for
    assert all(state.startswith("[worker 0] ") for state in states)
    # While it is live it never wraps; its final state is complete, whatever its width.
    assert max(map(len, states[:-1])) < COLUMNS
    assert states[-1] == "[worker 0] 20/20 " + "━" * 20 + " loss: 0.0500 - accuracy: 1.0000"


def test_the_first_process_knows_the_room_behind_its_name(launch, tmp_path) -> None:
    code, text = on_terminal(launch, "import shutil; print(shutil.get_terminal_size().columns)")
    assert code == 0
    expected = str(COLUMNS - len("[worker 0] "))
    assert f"\x1b[2m[worker 0] \x1b[22m{expected}" in text
    (log,) = tmp_path.glob("tfdist-logs/*/worker-0.log")
    assert log.read_text() == f"{expected}\n"


def test_failure_is_reported_below_the_live_line(launch, tmp_path) -> None:
    script = """
        if index == 0:
            print("\\r5/20", end="", flush=True)
            time.sleep(1000)
        while not Path("drawn").exists(): time.sleep(0.01)
        sys.exit(3)
    """

    def note(text: str) -> None:
        if "5/20" in text:
            (tmp_path / "drawn").touch()

    code, text = on_terminal(launch, script, note, NO_COLOR="1")
    assert code == 3
    assert "\x1b[2m" not in text
    rows = [visible(final_state(row)) for row in text.split("\r\n")]
    assert rows[1:3] == ["[worker 0] 5/20", "tfdist: worker 1 failed with exit code 3; its last lines:"]


def test_what_the_terminal_has_shown_is_not_shown_twice(launch) -> None:
    script = """
        if index == 1: time.sleep(1000)
        sys.exit("no such column")
    """
    code, text = on_terminal(launch, script, NO_COLOR="1")
    assert code == 1
    rows = [visible(final_state(row)) for row in text.split("\r\n")]
    assert rows[1:3] == [
        "[worker 0] no such column",
        "tfdist: worker 0 failed with exit code 1; its last lines are above",
    ]
