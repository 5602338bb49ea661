"""Each end of a connection makes the other one prove that it knows the secret, whatever that one is content with."""

from __future__ import annotations

import os
import socket
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from tfdist.cluster.authentication import authenticate

# A challenge, then praise for whatever is answered, then an answer that is made up; in any order that is asked for, one
# who does not know the secret can do no better.
GUESSED = (b"#CHALLENGE#{sha256}" + os.urandom(20), b"#WELCOME#", b"{sha256}" + os.urandom(32))


@pytest.mark.parametrize("first", [True, False], ids=["by the server", "by the client"])
def test_who_does_not_know_the_secret_is_refused(first: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stranger = Connection(socket.create_connection(listening.getsockname()).detach())
        accepted, _ = listening.accept()
    with stranger:
        for message in GUESSED:
            stranger.send_bytes(message)
        with pytest.raises(AuthenticationError):
            authenticate(accepted, b"of this job", first=first)
