"""What the launcher and its agents say to each other, whatever the shells in between print."""

from __future__ import annotations

import contextlib
import itertools
import os
from io import FileIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.launcher.hosts.connection import Channel, LineError, Lines, line

GREETING = "greeting"
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"kind": st.text(max_size=5), "more": st.text(max_size=50)}, optional={"greeting": st.none()}
    ),
    max_size=6,
)
CUTS = st.lists(st.integers(0, 400), max_size=8)


def fed(lines: Lines, data: bytes, cuts: list[int]) -> list:
    """All that is found if the bytes come in pieces."""
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [found for begin, end in itertools.pairwise(places) for found in lines.feed(data[begin:end])]


@given(noise=st.binary(max_size=100), messages=MESSAGES, cuts=CUTS)
def test_what_a_shell_prints_before_the_greeting_is_noise(noise: bytes, messages: list[dict], cuts: list[int]) -> None:
    lines, hello = Lines(GREETING), {"kind": "hello", "greeting": GREETING}
    said = b"".join(line(**one) for one in (hello, *messages))
    assert fed(lines, noise + b"\n" + said, cuts) == [hello, *messages]
    assert lines.noise == noise + b"\n"


@given(st.binary(max_size=300), CUTS)
def test_other_bytes_are_no_messages_and_do_nothing_else(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(LineError):
        for found in fed(Lines(), data, cuts):
            assert isinstance(found["kind"], str)
    assert fed(Lines(GREETING), data, cuts) == []


def test_a_greeting_in_a_lot_of_noise() -> None:
    lines = Lines(GREETING)
    for _ in range(100):
        assert lines.feed(os.urandom(100_000)) == []
    hello = {"kind": "hello", "greeting": GREETING}
    assert lines.feed(line(kind="hello", greeting="another") + b"the end\n" + line(**hello)) == [hello]
    assert lines.noise.endswith(b"the end\n") and len(lines.noise) <= 4096


@pytest.mark.parametrize(
    "text", [b"Broadcast message from root@node-1", b"", b"{}", b"null", b'{"kind": 3}', b"{\xff}", b"[" * 20_000]
)
def test_what_is_no_message(text: bytes) -> None:
    with pytest.raises(LineError):
        Lines().feed(text + b"\n")


def test_a_line_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdist.launcher.hosts.connection._LONGEST", 1000)
    lines = Lines(GREETING)
    assert lines.feed(b"x" * 1001) == []
    lines.feed(b"\n" + line(kind="hello", greeting=GREETING))
    with pytest.raises(LineError):
        lines.feed(b"x" * 1001)


def test_variables_of_any_bytes_arrive() -> None:
    """Python has bytes that are no UTF-8 as lone surrogates."""
    value = os.fsdecode(b"\xff\xfe")
    assert Lines().feed(line(kind="start", env={"A": value})) == [{"kind": "start", "env": {"A": value}}]


def test_a_channel_keeps_what_cannot_be_sent_and_waits_for_nobody() -> None:
    there, back = os.pipe(), os.pipe()
    one = Channel(FileIO(back[0], "rb"), FileIO(there[1], "wb"))
    other = Channel(FileIO(there[0], "rb"), FileIO(back[1], "wb"))
    try:
        for _ in range(40):
            one.send(line(kind="output", data="x" * 100_000))
        assert len(one.unsent) > 3_000_000
        heard = 0
        while one.unsent:
            one.send()
            heard += sum(len(found["data"]) for found in other.receive())
        while found := other.receive():
            heard += sum(len(one["data"]) for one in found)
        assert heard == 40 * 100_000 and not other.has_ended
        one.close()
        assert other.receive() == [] and other.has_ended
        other.send(line(kind="beat"))  # nobody hears it: no error
        one.close()
    finally:
        one.close()
        other.close()


def test_an_end_is_seen_together_with_what_precedes_it() -> None:
    """Whoever hears of its consequences first would blame somebody else."""
    (reading, writing), (other, nowhere) = os.pipe(), os.pipe()
    channel = Channel(FileIO(reading, "rb"), FileIO(nowhere, "wb"))
    try:
        os.write(writing, line(kind="beat"))
        assert channel.receive() == [{"kind": "beat"}] and not channel.has_ended
        os.write(writing, line(kind="beat"))
        os.close(writing)
        assert channel.receive() == [{"kind": "beat"}] and channel.has_ended
    finally:
        channel.close()
        os.close(other)
