"""The handshake: both ends prove that they know a secret, and agree on keys for all that follows.

server                                         client
{"tfdist": 2, "challenge": S}             -->
                                          <--  {"tfdist": 2, "challenge": C, "proof": HMAC(secret, "client" S C)}
{"proof": HMAC(secret, "server" S C)}     -->

The secret is never sent. Somebody in between can pass these messages on, but not what follows in an altered form: its
codes are made with keys from the secret and both challenges, which nobody else knows.

Of another version only "tfdist" is read, by which each end can say so at once. Nobody has proved it: it ends no job.
"""

from __future__ import annotations

import hmac
import math
import secrets
import time
from multiprocessing import AuthenticationError

from tfdist.cluster.connections.connection import Connection, receive, send

VERSION = 2
# For all messages together: a byte now and then keeps nobody busy for ever. Thousands that come at once need time.
SECONDS = 30.0
_LARGEST = 1024
# The errors by which a connection ends.
ENDS = (OSError, EOFError, AuthenticationError)


class OtherVersionError(AuthenticationError):
    """The other end says that it is of another version: whoever it is, its proofs cannot be checked."""


def authenticate(
    connection: Connection, secret: bytes, first: bool, *, seal: bool = True, deadline: float = math.inf
) -> None:
    """Lets each end of a new connection prove that it knows the secret; the server is the `first` to challenge.

    Args:
        connection: The connection; it is `known` on return.
        secret: What both ends know.
        first: Whether this is the server.
        seal: Whether all further messages have codes; both ends have to say the same.
        deadline: Until when it has to be done, on `time.monotonic`'s clock, if that is earlier than `SECONDS` from now.

    Raises:
        OtherVersionError: If the other end is of another version; it is told so, too.
        multiprocessing.AuthenticationError: If the other end does not know the secret.
        EOFError: If it hangs up, as whoever learns that this end does not know its secret.
        OSError: If it does not answer in time, or says something else.
    """
    deadline = min(deadline, time.monotonic() + SECONDS)
    own = {"tfdist": VERSION, "challenge": secrets.token_hex(32)}
    if first:
        send(connection, own, deadline)
        said = _hear(connection, deadline)
        challenges = own["challenge"], _text(said, "challenge")
        _check(said, _code(secret, "client", challenges, seal))
        send(connection, {"proof": _code(secret, "server", challenges, seal).hex()}, deadline)
    else:
        try:
            said = _hear(connection, deadline)
        except OtherVersionError:
            send(connection, own, deadline)
            raise
        challenges = _text(said, "challenge"), own["challenge"]
        send(connection, {**own, "proof": _code(secret, "client", challenges, seal).hex()}, deadline)
        _check(receive(connection, _LARGEST, deadline), _code(secret, "server", challenges, seal))
    if seal:
        keys = [_code(secret, f"messages of the {end}", challenges, seal) for end in ("server", "client")]
        connection.seal(*(keys if first else reversed(keys)))
    connection.known = True


def _hear(connection: Connection, deadline: float) -> dict:
    said = receive(connection, _LARGEST, deadline)
    version = said.get("tfdist")
    if type(version) is int and version != VERSION:
        raise OtherVersionError(
            f"it uses another version of tfdist (received version {version} of the handshake, expected {VERSION}); "
            "install the same one on every machine"
        )
    return said


def _text(said: dict, name: str) -> str:
    value = said.get(name)
    if not isinstance(value, str):
        raise AuthenticationError(f"it sends no {name}")
    return value


def _check(said: dict, expected: bytes) -> None:
    if not hmac.compare_digest(_text(said, "proof").encode(), expected.hex().encode()):
        raise AuthenticationError("it has another secret")


def _code(secret: bytes, purpose: str, challenges: tuple[str, str], seal: bool) -> bytes:
    words = ["tfdist", str(VERSION), purpose, "sealed" if seal else "open", *challenges]
    # With their lengths: no two lists of words give the same bytes.
    data = b"".join(len(word.encode()).to_bytes(4, "big") + word.encode() for word in words)
    return hmac.digest(secret, data, "sha256")
