"""What processes print: lines with progress bars, and how they are shown."""

from __future__ import annotations

import io
import re

import pytest

from tfdist.launcher.terminal import Line, LineBuffer, Move, Terminal, hidden_lines, last_lines, render

BAR = "\x1b[1m1/2\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━\x1b[0m loss: 0.5"


def lines(data: bytes, chunk: int | None = None, colour: bool = False) -> list[str]:
    buffer = LineBuffer()
    events = []
    for start in range(0, len(data), chunk or len(data) or 1):
        events += buffer.feed(data[start : start + (chunk or len(data))])
    events += buffer.feed(b"", final=True)
    return [render(event.cells, colour) for event in events if isinstance(event, Line)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"\n\na\n", ["", "", "a"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"10%\r20%\r100%\n", ["100%"]),
        (b"long line\rshort\n", ["shortline"]),
        (b"long line\r\x1b[Kshort\n", ["short"]),
        (b"long line\r\x1b[2Kshort\n", ["short"]),
        (b"abc\x1b[1Kd\n", ["   d"]),
        (b"1/9\b\b\b2/9\n", ["2/9"]),
        (b"\b\b\ba\n", ["a"]),
        (b"a\x1b[3Cb\n", ["a   b"]),
        (b"abc\x1b[2DX\n", ["aXc"]),
        (b"abc\x1b[1GX\n", ["Xbc"]),
        (b"a\x1b[?25lb\x1b]0;title\x07c\n", ["abc"]),
        (b"a\x1bb\n", ["a"]),
        (b"up\x1b[Aagain\n", ["again"]),
        (b"end\x1b", ["end"]),
        (b"\x1b[31m\xe2\x9c\x93 ok\x1b[0m\n", ["✓ ok"]),
    ],
)
@pytest.mark.parametrize("chunk", [None, 1, 2, 3])
def test_final_state_of_each_line_however_it_is_cut(data: bytes, expected: list[str], chunk: int | None) -> None:
    assert lines(data, chunk) == expected


def test_bytes_that_are_not_utf8_survive() -> None:
    (text,) = lines(b"\xff\xfea\n", chunk=1)
    assert text.encode("utf-8", "surrogateescape") == b"\xff\xfea"


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_keras_progress_bar(chunk: int | None) -> None:
    width = len("1/2 ━━━━ loss: 0.5")
    written = "Epoch 1/1\n\r" + BAR + "\b" * width + "\r" + BAR.replace("1/2", "2/2").replace("0.5", "0.4") + "\n"
    assert lines(written.encode(), chunk) == ["Epoch 1/1", "2/2 ━━━━ loss: 0.4"]


def test_unfinished_line_can_be_seen() -> None:
    buffer = LineBuffer()
    assert buffer.feed(b"\r1/2") == []
    assert render(buffer.cells) == "1/2"
    assert buffer.feed(b"\r2/2") == []
    assert render(buffer.cells) == "2/2"


def test_vertical_moves_come_with_the_row_they_leave() -> None:
    (event,) = LineBuffer().feed(b"second bar\x1b[1A")
    assert isinstance(event, Move)
    assert event.sequence == "\x1b[1A"
    assert render(event.cells) == "second bar"


def test_colours_are_kept_or_dropped() -> None:
    data = b"\x1b[1mbold\x1b[0m plain \x1b[31mred\x1b[0m\n"
    assert lines(data) == ["bold plain red"]
    assert lines(data, colour=True) == ["\x1b[1mbold\x1b[0m plain \x1b[31mred\x1b[0m"]


def test_colour_reaches_over_lines() -> None:
    assert lines(b"\x1b[31ma\nb\x1b[0m\nc\n", colour=True) == ["\x1b[31ma\x1b[0m", "\x1b[31mb\x1b[0m", "c"]


def test_reset_within_a_sequence() -> None:
    assert lines(b"\x1b[1mx\x1b[0;32my\x1b[m\n", colour=True) == ["\x1b[1mx\x1b[0m\x1b[0;32my\x1b[0m"]


@pytest.mark.parametrize(("columns", "expected"), [(0, ""), (3, "a世"), (4, "a世b"), (2, "a"), (None, "a世bc")])
def test_cut_at_columns(columns: int | None, expected: str) -> None:
    (event,) = LineBuffer().feed("a世bc\n".encode())
    assert render(event.cells, columns=columns) == expected


def test_last_lines() -> None:
    log = b"".join(b"line %d\n" % number for number in range(30)) + b"5%\r99%\n\n  \n"
    assert last_lines(log, 3) == ("line 28", "line 29", "99%")
    assert last_lines(b"", 3) == ()


def pipe() -> tuple[Terminal, io.BytesIO]:
    stream = io.BytesIO()
    return Terminal(stream, is_tty=False, live="worker 0"), stream


def tty(columns: int = 30, colour: bool = False) -> tuple[Terminal, io.BytesIO]:
    stream = io.BytesIO()
    return Terminal(stream, is_tty=True, colour=colour, live="worker 0", columns=columns), stream


def test_lines_are_prefixed() -> None:
    terminal, stream = pipe()
    terminal.feed("worker 0", b"a\n\nb")
    terminal.feed("worker 1", b"x\n")
    terminal.feed("worker 0", b"c\n")
    assert stream.getvalue() == b"[worker 0] a\n[worker 0]\n[worker 1] x\n[worker 0] bc\n"


def test_end_of_output_completes_the_line() -> None:
    terminal, stream = pipe()
    terminal.feed("worker 0", b"no newline")
    terminal.feed("worker 0", b"", final=True)
    assert stream.getvalue() == b"[worker 0] no newline\n"


def test_pipe_gets_the_final_state_of_progress_only() -> None:
    terminal, stream = pipe()
    for step in range(5):
        terminal.feed("worker 0", b"\b\b\b\r%d/4" % step)
    assert stream.getvalue() == b""
    terminal.feed("worker 0", b"\n")
    assert stream.getvalue() == b"[worker 0] 4/4\n"


def test_terminal_shows_progress_in_one_live_line() -> None:
    terminal, stream = tty()
    terminal.feed("worker 0", b"\r1/2")
    terminal.feed("worker 0", b"\r2/2")
    terminal.feed("worker 0", b"\n")
    assert stream.getvalue() == b"[worker 0] 1/2\r\x1b[K[worker 0] 2/2\r\x1b[K[worker 0] 2/2\n"


def test_live_line_is_cut_at_the_width_and_complete_at_its_end() -> None:
    terminal, stream = tty(columns=20)
    terminal.feed("worker 0", b"0123456789")
    assert stream.getvalue() == b"[worker 0] 01234567"
    terminal.feed("worker 0", b"\n")
    assert stream.getvalue().endswith(b"\r\x1b[K[worker 0] 0123456789\n")


def test_lines_of_others_go_above_the_live_line() -> None:
    terminal, stream = tty()
    terminal.feed("worker 0", b"1/2")
    terminal.feed("worker 1", b"partial")
    terminal.feed("worker 1", b" hello\n")
    assert stream.getvalue() == b"[worker 0] 1/2\r\x1b[K[worker 1] partial hello\n[worker 0] 1/2"


def test_messages_go_above_the_live_line(capsys: pytest.CaptureFixture[str]) -> None:
    terminal, stream = tty()
    terminal.feed("worker 0", b"1/2")
    terminal.message("hello")
    assert stream.getvalue() == b"[worker 0] 1/2\r\x1b[K[worker 0] 1/2"
    assert capsys.readouterr().err == "tfdist: hello\n"


def test_prefix_is_dim_where_colours_are_wanted() -> None:
    terminal, stream = tty(colour=True)
    terminal.feed("worker 0", b"\x1b[31mred\x1b[0m\n")
    assert stream.getvalue() == b"\x1b[2m[worker 0] \x1b[22m\x1b[31mred\x1b[0m\n"


def test_cursor_moves_are_passed_on_after_the_row() -> None:
    terminal, stream = tty()
    terminal.feed("worker 0", b"bar 0\nbar 1\x1b[A")
    assert stream.getvalue() == b"[worker 0] bar 0\n[worker 0] bar 1\x1b[A\r"
    terminal.feed("worker 0", b"\rBAR 0")
    assert stream.getvalue().endswith(b"\x1b[A\r\r\x1b[K[worker 0] BAR 0")


def test_cursor_moves_are_dropped_in_a_pipe() -> None:
    terminal, stream = pipe()
    terminal.feed("worker 0", b"bar 1\x1b[Anext\n")
    assert stream.getvalue() == b"[worker 0] next\n"


def test_room_behind_the_prefix() -> None:
    terminal, _ = tty(columns=80)
    assert terminal.size_inside("worker 0").columns == 69
    assert terminal.size_inside("worker 10").columns == 68


def test_gone_reader_does_not_end_the_run() -> None:
    class Gone(io.BytesIO):
        def flush(self) -> None:
            raise BrokenPipeError

    terminal = Terminal(Gone(), is_tty=True, live="worker 0", columns=30)
    terminal.feed("worker 0", b"a\n")
    terminal.feed("worker 0", b"b\n")
    assert terminal.is_tty is False


# What TensorFlow 2.20 and 2.21 write at their start on a machine without a GPU.
STARTUP = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795590664.791870   30750 port.cc:153] oneDNN custom operations are on. You may see slightly different
2026-11-25 07:11:04.794151: I tensorflow/core/util/port.cc:153] oneDNN custom operations are on. You may see
I0000 00:00:1795590748.008194    3717 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use available CPU
To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow
"""
WITHOUT_GPU = """\
2026-11-25 07:11:04.79: I external/local_xla/xla/tsl/cuda/cudart_stub.cc:31] Could not find cuda drivers on your machine
I0000 00:00:1795590664.794151   30750 cudart_stub.cc:31] Could not find cuda drivers on your machine, GPU will not be
E0000 00:00:1795590676.433342   30750 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error: Failed call
"""


def shown(hidden: re.Pattern[str] | None, text: str) -> list[str]:
    stream = io.BytesIO()
    Terminal(stream, is_tty=False, live="worker 0", hidden=hidden).feed("worker 0", text.encode())
    return [line.removeprefix("[worker 0] ") for line in stream.getvalue().decode().splitlines()]


def test_what_tensorflow_writes_at_its_start_is_not_shown() -> None:
    hidden = hidden_lines(show_all=False, env={}, has_driver=False)
    assert shown(hidden, STARTUP + WITHOUT_GPU + "Epoch 1/2\n") == ["Epoch 1/2"]


def test_why_a_gpu_is_not_used_is_shown_where_there_is_one() -> None:
    hidden = hidden_lines(show_all=False, env={}, has_driver=True)
    assert shown(hidden, STARTUP + WITHOUT_GPU) == WITHOUT_GPU.splitlines()


def test_lines_of_the_program_and_errors_of_tensorflow_are_shown() -> None:
    own = [
        "print: failed call to cuInit",
        "E0000 00:00:1.2   3 x.cc:1] Cannot dlopen",
        "",
        "W0000 00:00:1.2   3 x.cc:1] a",
    ]
    assert shown(hidden_lines(show_all=False, env={}, has_driver=False), "\n".join([*own, ""])) == [
        line or "[worker 0]" for line in own
    ]


@pytest.mark.parametrize(("show_all", "env"), [(True, {}), (False, {"TF_CPP_MIN_LOG_LEVEL": "0"})])
def test_everything_is_shown_to_whoever_asks_for_it(show_all: bool, env: dict[str, str]) -> None:
    assert shown(hidden_lines(show_all, env, has_driver=False), STARTUP + WITHOUT_GPU) == [
        *STARTUP.splitlines(),
        *WITHOUT_GPU.splitlines(),
    ]
