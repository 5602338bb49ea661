"""What each process registers with rank 0, and the addresses that follow from it. Pure functions."""

from __future__ import annotations

import collections
import dataclasses
import ipaddress
import json
import typing
from collections.abc import Mapping

from tfdist.cluster import sockets
from tfdist.cluster.foreign_text import cleaned

_LONGEST = 1000


@dataclasses.dataclass(frozen=True)
class Registration:
    """What one process tells about itself.

    Attributes:
        rank: Its number.
        size: How many processes it believes there are.
        port: The port that it has reserved for TensorFlow's server.
        host: The name by which it wants to be reached; `None` for the address that it is connected from.
        address: The address that it is connected from, as itself sees it.
        name: Of its host, for people.
        pid: Number of the process there.
        devices: Equal for two processes on a host if they see the same GPUs.
        reached: The address at which it has reached rank 0, which fills it in.
    """

    rank: int
    size: int
    port: int
    host: str | None
    address: str
    name: str
    pid: int
    devices: str = ""
    reached: str = ""

    @classmethod
    def from_json(cls, text: bytes) -> Registration:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: If it is something else.

        Example:
            >>> one = Registration(1, 2, 2222, None, "10.0.0.2", "node-2", 77)
            >>> Registration.from_json(one.to_json()) == one
            True
        """
        try:
            content = json.loads(text)
        except RecursionError:
            content = None
        types = typing.get_type_hints(cls)
        if not isinstance(content, dict) or content.keys() != types.keys():
            raise ValueError("expected the fields of a registration")
        if not all(
            isinstance(content[name], kind) and not isinstance(content[name], bool) for name, kind in types.items()
        ):
            raise ValueError("expected other types in a registration")
        host = content["host"]
        if not 0 < content["port"] < 65536 or (host is not None and cleaned(host) != host):
            raise ValueError("expected a port from 1 to 65535 and the name of a host")
        ipaddress.ip_address(content["address"])
        texts = {name: cleaned(content[name], _LONGEST) for name in ("name", "devices", "reached")}
        return cls(**{**content, **texts})

    def to_json(self) -> bytes:
        """The text that is sent to rank 0."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name}, process {self.pid})"


def agreed(own: str, guests: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """The address of each rank that all hosts can use.

    A process whose connection to rank 0 has the same address at both ends is on the host of rank 0. If all processes
    are there, a loopback address will do; otherwise the host of rank 0 gets the address at which most of the others
    have reached it.

    Args:
        own: A loopback address.
        guests: For each other rank, the address that it is connected from, and the one at which it has reached rank 0.

    Example:
        >>> agreed("127.0.0.1", {1: ("127.0.0.1", "127.0.0.1"), 2: ("10.0.0.2", "10.0.0.1")})
        {0: '10.0.0.1', 1: '10.0.0.1', 2: '10.0.0.2'}
    """
    here = {rank for rank, (place, reached) in guests.items() if place == reached or sockets.is_loopback(place)}
    outside = collections.Counter(reached for rank, (_, reached) in guests.items() if rank not in here)
    if outside:
        own = outside.most_common(1)[0][0]
    elif here and all(":" in guests[rank][0] for rank in here):
        own = "::1"
    return {0: own, **{rank: own if rank in here else place for rank, (place, _) in guests.items()}}
