"""What the launcher and its agents say to each other through the standard input and output of ssh.

    kind (1 byte) | length (4 bytes) | content

A message is JSON, output of a process is its number (2 bytes) and the bytes. Before an agent's first frame comes
whatever the user's shell has printed over there, and then a greeting that only the agent can know.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import time
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("!cI")
_NUMBER = struct.Struct("!H")
_MESSAGE, _OUTPUT = b"J", b"O"
# An environment can have megabytes.
_LONGEST = 64 << 20
_CHUNK = 256 * 1024
_MOST_READS = 16
_NOISE = 4096

Message = dict[str, Any]


class FrameError(ValueError):
    """Bytes that are no frame: something else prints into the connection."""


@dataclass(frozen=True)
class Output:
    """What a process has printed.

    Attributes:
        number: of the process.
        data: the bytes.
    """

    number: int
    data: bytes


def message(**fields: Any) -> bytes:
    """The frame of a message.

    Example:
        >>> message(kind="beat")
        b'J\\x00\\x00\\x00\\x10{"kind": "beat"}'
    """
    content = json.dumps(fields).encode()
    return _HEADER.pack(_MESSAGE, len(content)) + content


def output(number: int, data: bytes) -> bytes:
    """The frame of what a process has printed."""
    return _HEADER.pack(_OUTPUT, _NUMBER.size + len(data)) + _NUMBER.pack(number) + data


class Decoder:
    """Finds the frames in bytes that come in pieces.

    Args:
        greeting: what precedes the first frame; all before that is noise.

    Attributes:
        noise: the end of what came before the greeting.
        is_greeted: whether the greeting has come.

    Example:
        >>> decoder = Decoder(b"hello")
        >>> decoder.feed(b"Welcome to node-1!\\nhel"), decoder.feed(b"lo" + message(kind="beat"))
        ([], [{'kind': 'beat'}])
        >>> decoder.noise
        b'Welcome to node-1!\\n'
    """

    def __init__(self, greeting: bytes = b"") -> None:
        self._greeting = greeting
        self._buffer = bytearray()
        self.noise = b""
        self.is_greeted = not greeting

    def feed(self, data: bytes) -> list[Message | Output]:
        """Takes bytes, and returns what is complete.

        Raises:
            FrameError: behind the greeting there is something else than frames.
        """
        self._buffer += data
        if not self.is_greeted and not self._find_greeting():
            return []
        found: list[Message | Output] = []
        at = 0
        while len(self._buffer) - at >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer, at)
            if kind not in (_MESSAGE, _OUTPUT) or length > _LONGEST:
                raise FrameError(f"{bytes(self._buffer[at : at + 40])!r}")
            begin, end = at + _HEADER.size, at + _HEADER.size + length
            if end > len(self._buffer):
                break
            found.append(_decoded(kind, bytes(self._buffer[begin:end])))
            at = end
        del self._buffer[:at]
        return found

    def _find_greeting(self) -> bool:
        at = self._buffer.find(self._greeting)
        self.is_greeted = at >= 0
        # The greeting may have begun.
        end = at if self.is_greeted else max(len(self._buffer) - len(self._greeting) + 1, 0)
        self.noise = (self.noise + self._buffer[:end])[-_NOISE:]
        del self._buffer[: end + (len(self._greeting) if self.is_greeted else 0)]
        return self.is_greeted


def _decoded(kind: bytes, content: bytes) -> Message | Output:
    if kind == _OUTPUT:
        if len(content) < _NUMBER.size:
            raise FrameError(f"{content!r}")
        return Output(_NUMBER.unpack_from(content)[0], content[_NUMBER.size :])
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("kind"), str):
        raise FrameError(f"{content[:40]!r}")
    return found


class Channel:
    """One end of a connection. Nothing waits here: what cannot be sent now is sent by a later call.

    Args:
        reading: file descriptor, which belongs to the channel from now on.
        writing: the same.
        greeting: see `Decoder`.

    Attributes:
        decoder: finds the frames.
        heard: when something has come, on the clock of `time.monotonic`.
        has_ended: whether nothing more can come.
    """

    def __init__(self, reading: int, writing: int, greeting: bytes = b"") -> None:
        self.reading, self._writing = reading, writing
        for descriptor in (reading, writing):
            os.set_blocking(descriptor, False)
        self.decoder = Decoder(greeting)
        self.heard = time.monotonic()
        self.has_ended = False
        self._unsent = bytearray()
        # The launcher's heart beats in a thread of its own.
        self._lock = threading.Lock()

    @property
    def unsent(self) -> int:
        """How many bytes wait to be sent."""
        return len(self._unsent)

    def send(self, frame: bytes = b"") -> None:
        """Sends a frame, or what still waits, as far as that is possible now."""
        with self._lock:
            self._unsent += frame
            # Nobody reads it any more: that is noticed where something should come from there.
            with contextlib.suppress(OSError):
                while self._unsent and self._writing >= 0:
                    del self._unsent[: os.write(self._writing, self._unsent[:_CHUNK])]

    def receive(self) -> list[Message | Output]:
        """What has come since the last call.

        Raises:
            FrameError: something else than frames has come.
        """
        found: list[Message | Output] = []
        # Also the end, where that is right behind: what it has caused elsewhere is known in a moment.
        for _ in range(_MOST_READS):
            if self.has_ended:
                break
            try:
                data = os.read(self.reading, _CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.has_ended = not data
            if data:
                self.heard = time.monotonic()
                found += self.decoder.feed(data)
        return found

    def close(self) -> None:
        """Closes the connection; a second call does nothing."""
        with self._lock:
            if self._writing >= 0:
                os.close(self._writing)
                os.close(self.reading)
                self._writing = -1
