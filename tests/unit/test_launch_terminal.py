from __future__ import annotations

import io

import pytest

from tfdist.launch.terminal import Terminal


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
