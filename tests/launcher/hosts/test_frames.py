"""What the launcher and its agents say to each other, whatever the shells in between print."""

from __future__ import annotations

import contextlib
import itertools
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.launcher.hosts.frames import Channel, Decoder, FrameError, Output, message, output

GREETING = b"\x00greeting of 16 b"
FRAMES = st.lists(
    st.one_of(
        st.builds(lambda kind, more: message(kind=kind, more=more), st.text(max_size=5), st.text(max_size=50)),
        st.builds(output, st.integers(0, 65535), st.binary(max_size=50)),
    ),
    max_size=6,
)
CUTS = st.lists(st.integers(0, 400), max_size=8)


def fed(decoder: Decoder, data: bytes, cuts: list[int]) -> list:
    """All that is found if the bytes come in pieces."""
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    return [found for begin, end in itertools.pairwise(places) for found in decoder.feed(data[begin:end])]


def meaning(frames: list[bytes]) -> list:
    return Decoder().feed(b"".join(frames))


@given(noise=st.binary(max_size=100), frames=FRAMES, cuts=CUTS)
def test_what_a_shell_prints_before_the_greeting_is_noise(noise: bytes, frames: list[bytes], cuts: list[int]) -> None:
    decoder = Decoder(GREETING)
    noise = noise.replace(GREETING, b"")
    assert fed(decoder, noise + GREETING + b"".join(frames), cuts) == meaning(frames)
    assert decoder.is_greeted and decoder.noise == noise


@given(st.binary(max_size=300), CUTS)
def test_other_bytes_are_no_frames_and_do_nothing_else(data: bytes, cuts: list[int]) -> None:
    with contextlib.suppress(FrameError):
        for found in fed(Decoder(), data, cuts):
            assert isinstance(found, Output) or isinstance(found["kind"], str)
    decoder = Decoder(GREETING)
    assert fed(decoder, data.replace(GREETING, b""), cuts) == [] and not decoder.is_greeted


def test_a_greeting_in_a_lot_of_noise() -> None:
    decoder = Decoder(GREETING)
    for _ in range(100):
        assert decoder.feed(os.urandom(100_000).replace(GREETING, b"")) == []
    assert decoder.feed(b"the end" + GREETING + message(kind="hello")) == [{"kind": "hello"}]
    assert decoder.noise.endswith(b"the end") and len(decoder.noise) <= 4096


def test_a_beginning_of_the_greeting_is_no_greeting() -> None:
    decoder = Decoder(GREETING)
    for piece in (GREETING[:5], GREETING[:7], GREETING[:1]):
        assert decoder.feed(piece) == []
    assert decoder.feed(GREETING[1:]) == [] and decoder.is_greeted
    assert decoder.noise == GREETING[:5] + GREETING[:7]


@pytest.mark.parametrize(
    "data",
    [
        b"Broadcast message from root@node-1",
        b"J\xff\xff\xff\xff",
        b"O\x00\x00\x00\x01x",
        b"J\x00\x00\x00\x02{}",
        b"J\x00\x00\x00\x04null",
        b"J\x00\x00\x00\x03{\xff}",
        b"J" + (20_000).to_bytes(4, "big") + b"[" * 20_000,
    ],
)
def test_what_is_no_frame(data: bytes) -> None:
    with pytest.raises(FrameError):
        Decoder().feed(data)


def test_variables_of_any_bytes_arrive() -> None:
    """Python has bytes that are no UTF-8 as lone surrogates."""
    value = os.fsdecode(b"\xff\xfe")
    assert Decoder().feed(message(kind="start", env={"A": value})) == [{"kind": "start", "env": {"A": value}}]


def test_a_channel_keeps_what_cannot_be_sent_and_waits_for_nobody() -> None:
    there, back = os.pipe(), os.pipe()
    one, other = Channel(back[0], there[1]), Channel(there[0], back[1])
    try:
        for _ in range(40):
            one.send(output(3, b"x" * 100_000))
        assert one.unsent > 3_000_000
        heard = 0
        while one.unsent:
            one.send()
            heard += sum(len(found.data) for found in other.receive())
        while found := other.receive():
            heard += sum(len(one.data) for one in found)
        assert heard == 40 * 100_000 and not other.has_ended
        one.close()
        assert other.receive() == [] and other.has_ended
        other.send(message(kind="beat"))  # nobody hears it: no error
        one.close()
    finally:
        one.close()
        other.close()


def test_an_end_is_seen_together_with_what_precedes_it() -> None:
    """Whoever hears of its consequences first would blame somebody else."""
    (reading, writing), (other, nowhere) = os.pipe(), os.pipe()
    channel = Channel(reading, nowhere)
    try:
        os.write(writing, message(kind="beat"))
        assert channel.receive() == [{"kind": "beat"}] and not channel.has_ended
        os.write(writing, message(kind="beat"))
        os.close(writing)
        assert channel.receive() == [{"kind": "beat"}] and channel.has_ended
    finally:
        channel.close()
        os.close(other)
