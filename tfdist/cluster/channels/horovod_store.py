"""The key-value store of Horovod's launcher: `PUT` and `GET` over HTTP, at the launcher's host."""

from __future__ import annotations

import http.client
import time
from collections.abc import Mapping

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership

_PATH = "/tfdist/meeting"
_REQUEST_SECONDS = 10.0
_PAUSE_SECONDS = 0.2


def open_channel(membership: Membership, env: Mapping[str, str]) -> HorovodStore:
    """The store that the environment names."""
    host, port = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], env["HOROVOD_GLOO_RENDEZVOUS_PORT"]
    return HorovodStore(host, int(port))


class HorovodStore:
    """One text in the store.

    Args:
        host: of the launcher.
        port: of its store.
    """

    def __init__(self, host: str, port: int):
        self._host, self._port = host, port

    def tell(self, text: str, seconds: float) -> None:
        """See `Channel`."""
        try:
            self._ask("PUT", text.encode())
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"horovodrun does not take what rank 0 tells, at {self._name}: {error}") from None

    def hear(self, seconds: float) -> str:
        """See `Channel`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return self._ask("GET").decode()
            except (OSError, http.client.HTTPException) as error:  # not found, until rank 0 has told it
                if time.monotonic() > deadline:
                    raise ClusterError(
                        f"Received: nothing from rank 0 within {seconds:g} s, through horovodrun at {self._name} "
                        f"({error}). Expected: where it can be met. See what rank 0 has printed"
                    ) from None
            time.sleep(_PAUSE_SECONDS)

    @property
    def _name(self) -> str:
        return f"{self._host}:{self._port}"

    def _ask(self, method: str, body: bytes | None = None) -> bytes:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=_REQUEST_SECONDS)
        try:
            connection.request(method, _PATH, body)
            answer = connection.getresponse()
            content = answer.read()
        finally:
            connection.close()
        if answer.status != http.client.OK:
            raise http.client.HTTPException(f"{answer.status} {answer.reason}")
        return content
