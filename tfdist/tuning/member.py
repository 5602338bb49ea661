"""Which part of a search a process is, and where the processes of a search meet."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.atomic_files import write_atomically
from tfdist.launcher.run_plan import REPLACEMENT

# Holds the JSON of a `Member` in the environment of each process.
VARIABLE = "TFDIST_TUNE"
# In the folder of the search's logs; who can read it can take part in the search.
MEETING = "tfdist-oracle.json"
# Ends a process whose whole tuner is to be started again, and goes on then: EX_TEMPFAIL of sysexits.h.
START_AGAIN = 75


@dataclass(frozen=True)
class Member:
    """A process of a search.

    Attributes:
        tuner: which tuner it belongs to, from 0. The first process of tuner 0 keeps the oracle.
        rank: which of the tuner's processes it is, from 0.
        tuners: how many tuners there are.
        processes: how many processes each tuner has.
        attempt: tells the starts of a tuner apart.
        search_id: names the whole search, over all starts.
        folder: of the logs; all processes have to see it.
        max_restarts: how often a trial is tried again whose tuner was killed.
        alone: whether all tuners are on this machine.
        process: the process' name in the launcher's messages and in the event log.

    Example:
        >>> member = Member(1, 0, 2, 1, "a", "s", "/logs", 3, True)
        >>> Member.of_process({VARIABLE: member.to_json()}) == member, Member.of_process({}), member.name
        (True, None, 'tuner 1')
    """

    tuner: int
    rank: int
    tuners: int
    processes: int
    attempt: str
    search_id: str
    folder: str
    max_restarts: int
    alone: bool
    process: str = ""

    @classmethod
    def of_process(cls, env: Mapping[str, str]) -> Member | None:
        """The member that a process with this environment is; None outside of a search."""
        text = env.get(VARIABLE)
        if not text:
            return None
        member = cls(**json.loads(text))
        number = env.get(REPLACEMENT)
        return dataclasses.replace(member, attempt=f"{member.attempt}.{number}") if number else member

    def to_json(self) -> str:
        """The value of the variable."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def keeps_oracle(self) -> bool:
        """Whether the others come to this process for their trials."""
        return self.tuner == 0 and self.rank == 0

    @property
    def name(self) -> str:
        """For people."""
        return name_of(self.tuner)

    @property
    def id(self) -> str:
        """By which KerasTuner knows the tuner."""
        return id_of(self.tuner)


def name_of(tuner: int) -> str:
    """A tuner, for people.

    Example:
        >>> name_of(1)
        'tuner 1'
    """
    return f"tuner {tuner}"


def id_of(tuner: int) -> str:
    """A tuner, for KerasTuner.

    Example:
        >>> id_of(1)
        'tuner1'
    """
    return f"tuner{tuner}"


@dataclass(frozen=True)
class Meeting:
    """Where the oracle is.

    Attributes:
        search_id: names the whole search.
        hosts: by which names and addresses its machine may be reached.
        port: where it listens; 0 once nobody does.
        key: what the processes prove to know.
        start: tells the starts of the oracle's process apart.
        ended: the exit code of the search, once it has ended.
    """

    search_id: str
    hosts: tuple[str, ...] = ()
    port: int = 0
    key: str = ""
    start: str = ""
    ended: int | None = None

    def write(self, folder: Path) -> None:
        """Replaces the file in a folder; only this user may read it.

        Raises:
            OSError: it cannot be written.
        """
        write_atomically(folder / MEETING, json.dumps(dataclasses.asdict(self)), mode=0o600)

    @classmethod
    def read(cls, folder: Path, search_id: str) -> Meeting | None:
        """What the file in a folder says about a search; None if there is none, or it is of another search."""
        with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
            fields: dict[str, Any] = json.loads((folder / MEETING).read_bytes())
            found = cls(**{**fields, "hosts": tuple(fields["hosts"])})
            return found if found.search_id == search_id else None
        return None


def own_hosts(alone: bool) -> tuple[str, ...]:
    """By which names and addresses the others may reach this machine.

    Args:
        alone: whether they are all on this machine.

    Example:
        >>> own_hosts(alone=True)
        ('127.0.0.1',)
    """
    if alone:
        return ("127.0.0.1",)
    import socket

    import psutil

    name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    addresses = [
        one.address
        for entries in psutil.net_if_addrs().values()
        for one in entries
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    return tuple(dict.fromkeys((name, *addresses)))
