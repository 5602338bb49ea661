from __future__ import annotations

import pytest

from tfdist.launch.output import Line, LineBuffer, Move, last_lines, render

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
