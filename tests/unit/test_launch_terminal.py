"""What processes print: lines with progress bars, and how they are shown."""

from __future__ import annotations

import io
import re

import pytest

from tfdist.launcher.output import LineBuffer, Terminal, hidden_lines, last_lines, plain

BAR = "\x1b[1m1/2\x1b[0m \x1b[32m━━\x1b[0m\x1b[37m━━\x1b[0m loss: 0.5"


def lines(data: bytes, chunk: int | None = None, colour: bool = False) -> list[str]:
    buffer = LineBuffer()
    rows = []
    for start in range(0, len(data), chunk or len(data) or 1):
        rows += buffer.feed(data[start : start + (chunk or len(data))])
    rows += buffer.feed(b"", final=True)
    return [row if colour else plain(row) for row in rows]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a\nb\n", ["a", "b"]),
        (b"a\nb", ["a", "b"]),
        (b"\n\na\n", ["", "", "a"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"10%\r20%\r100%\n", ["100%"]),
        (b"long line\rshort\n", ["short"]),
        (b"long line\r\x1b[Kshort\n", ["short"]),
        (b"long line\r\x1b[2Kshort\n", ["short"]),
        (b"\b\b\b\r2/9\n", ["2/9"]),
        (b"a\x1b[?25lb\x1b]0;title\x07c\n", ["abc"]),
        (b"a\x1bb\n", ["a"]),
        (b"up\x1b[Aagain\n", ["upagain"]),
        (b"end\x1b", ["end"]),
        (b"a\x1b[9999999999Cb\x1b[9999999999;1Hc\n", ["abc"]),
        (b"\x1b[31m\xe2\x9c\x93 ok\x1b[0m\n", ["✓ ok"]),
    ],
)
@pytest.mark.parametrize("chunk", [None, 1, 2, 3])
def test_final_state_of_each_line_however_it_is_cut(data: bytes, expected: list[str], chunk: int | None) -> None:
    assert lines(data, chunk) == expected


def test_a_row_without_an_end_is_broken() -> None:
    buffer, longest = LineBuffer(), 0
    found = []
    for _ in range(40):
        found += buffer.feed(b"x" * 5000)
        longest = max(longest, len(buffer.row))
    assert longest <= 1 << 14 and sum(map(len, found)) + len(buffer.row) == 200000
    # A progress bar that rewrites its row is not.
    assert lines(b"\r".join([b"y" * 1000] * 100) + b"\n", chunk=None) == ["y" * 1000]


def test_bytes_that_are_not_utf8_survive() -> None:
    (text,) = lines(b"\xff\xfea\n", chunk=1)
    assert text.encode("utf-8", "surrogateescape") == b"\xff\xfea"


@pytest.mark.parametrize("chunk", [None, 1, 7])
def test_keras_progress_bar(chunk: int | None) -> None:
    width = len("1/2 ━━━━ loss: 0.5")
    written = "Epoch 1/1\n\r" + BAR + "\b" * width + "\r" + BAR.replace("1/2", "2/2").replace("0.5", "0.4") + "\n"
    assert lines(written.encode(), chunk) == ["Epoch 1/1", "2/2 ━━━━ loss: 0.4"]


def test_colours_are_kept_or_dropped() -> None:
    data = b"\x1b[1mbold\x1b[0m plain \x1b[31mred\x1b[0m\n"
    assert lines(data) == ["bold plain red"]
    assert lines(data, colour=True) == ["\x1b[1mbold\x1b[0m plain \x1b[31mred\x1b[0m"]


def test_last_lines() -> None:
    log = b"".join(b"line %d\n" % number for number in range(30)) + b"5%\r99%\n\n  \n"
    assert last_lines(log, 3) == ("line 28", "line 29", "99%")
    assert last_lines(b"", 3) == ()


def pipe() -> tuple[Terminal, io.BytesIO]:
    stream = io.BytesIO()
    return Terminal(stream, is_tty=False, live="worker 0"), stream


def tty(columns: int = 30, colour: bool = False) -> tuple[Terminal, io.BytesIO]:
    stream = io.BytesIO()
    terminal = Terminal(stream, is_tty=True, colour=colour, live="worker 0")
    terminal._width = lambda: columns
    return terminal, stream


def test_lines_are_prefixed() -> None:
    terminal, stream = pipe()
    terminal.feed("worker 0", b"a\n\nb")
    terminal.feed("worker 1", b"x\n")
    terminal.feed("worker 0", b"c\n")
    assert stream.getvalue() == b"[worker 0] a\n[worker 0]\n[worker 1] x\n[worker 0] bc\n"


def test_terminal_shows_progress_in_one_live_line() -> None:
    terminal, stream = tty()
    terminal.feed("worker 0", b"\r1/2")
    terminal.feed("worker 0", b"\r2/2")
    terminal.feed("worker 0", b"\n")
    assert stream.getvalue() == b"[worker 0] 1/2\r\x1b[K[worker 0] 2/2\r\x1b[K[worker 0] 2/2\n"


def test_lines_of_others_go_above_the_live_line() -> None:
    terminal, stream = tty()
    terminal.feed("worker 0", b"1/2")
    terminal.feed("worker 1", b"partial")
    terminal.feed("worker 1", b" hello\n")
    assert stream.getvalue() == b"[worker 0] 1/2\r\x1b[K[worker 1] partial hello\n[worker 0] 1/2"


def test_colours_end_with_their_row() -> None:
    terminal, stream = tty(colour=True)
    terminal.feed("worker 0", b"\x1b[31mred\n")
    assert stream.getvalue() == b"\x1b[2m[worker 0] \x1b[22m\x1b[31mred\x1b[0m\n"


def test_room_behind_the_prefix() -> None:
    terminal, _ = tty(columns=80)
    assert [terminal.columns_inside(name) for name in ("worker 0", "worker 10")] == [69, 68]
    assert pipe()[0].columns_inside("worker 0") is None


def test_a_live_line_does_not_wrap() -> None:
    terminal, stream = tty(columns=16, colour=True)
    terminal.feed("worker 0", "\x1b[31ma世界bc\x1b[0m".encode())
    terminal.feed("worker 0", b"\n")
    assert stream.getvalue().decode().split("\r\x1b[K") == [
        "\x1b[2m[worker 0] \x1b[22ma世 ",
        "\x1b[2m[worker 0] \x1b[22m\x1b[31ma世界bc\x1b[0m\n",
    ]


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
