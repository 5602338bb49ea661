"""What a process tells when it comes to the rendezvous."""

from __future__ import annotations

import dataclasses
import ipaddress
import json


@dataclasses.dataclass(frozen=True)
class Entry:
    """One process.

    Attributes:
        rank: its number.
        size: how many it believes there are.
        port: which it has reserved for TensorFlow's server.
        host: the name by which it wants to be reached; `None` for the address that it is connected from.
        address: that it is connected from, as itself sees it.
        name: of its host, for people.
        pid: number of the process there.
        devices: equal for two processes on a host if they see the same GPUs.
    """

    rank: int
    size: int
    port: int
    host: str | None
    address: str
    name: str
    pid: int
    devices: str = ""

    @classmethod
    def from_json(cls, text: bytes) -> Entry:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: if it is something else.

        Example:
            >>> entry = Entry(1, 2, 2222, None, "10.0.0.2", "node-2", 77)
            >>> Entry.from_json(entry.to_json()) == entry
            True
        """
        content = json.loads(text)
        types = {"rank": int, "size": int, "port": int, "host": (str, type(None)), "address": str, "name": str}
        types |= {"pid": int, "devices": str}
        if not isinstance(content, dict) or content.keys() != types.keys():
            raise ValueError("expected the fields of an entry")
        if not all(isinstance(content[name], kind) for name, kind in types.items()):
            raise ValueError("expected other types in an entry")
        ipaddress.ip_address(content["address"])
        return cls(**content)

    def to_json(self) -> bytes:
        """What is sent."""
        return json.dumps(dataclasses.asdict(self)).encode()

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.name}, process {self.pid})"
