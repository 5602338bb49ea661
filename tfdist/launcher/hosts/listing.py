"""Which hosts the user names: --hosts a:8,b:8 and the host files of other launchers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tfdist.cluster.foreign_text import cleaned

# Nothing that could be taken for an option of ssh, or by a shell for something else.
_WORD = r"[\w.%][\w.%-]*"
_NAME = rf"(?:{_WORD}@)?(?:\[[0-9A-Fa-f:.%\w]+\]|{_WORD})"
_HOST = re.compile(rf"(?P<name>{_NAME})(?::(?P<slots>\d+))?")
_SLOTS = re.compile(r"slots\s*=\s*(\d+)")
# Of Open MPI's host files; none of them says how many processes to start.
_IGNORED = re.compile(r"max[-_]slots\s*=\s*\d+")
_SHOWN = 200


class ListError(ValueError):
    """A list of hosts that cannot be read; the text says what was found, and what is expected."""


@dataclass(frozen=True)
class ListedHost:
    """A host as the user names it.

    Attributes:
        name: what ssh takes: a name, an address or an alias of ~/.ssh/config, perhaps behind "user@".
        slots: how many processes it may have; None: as many as it has GPUs.
    """

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> list[ListedHost]:
    """Reads the value of --hosts.

    Raises:
        ListError: it is no list of hosts.

    Example:
        >>> parse_hosts("a:8,me@b")
        [ListedHost(name='a', slots=8), ListedHost(name='me@b', slots=None)]
    """
    words, where = [word.strip() for word in text.split(",")], f"--hosts {cleaned(text, _SHOWN)}"
    return _merged((_host(word, where) for word in words if word), where)


def parse_hostfile(text: str, path: str) -> list[ListedHost]:
    """Reads a host file: lines such as `node-1`, `node-1:8` or `node-1 slots=8`. What follows a # is a comment.

    A host without a number that stands on several lines has a process for each, as in $PBS_NODEFILE.

    Raises:
        ListError: a line is something else.

    Example:
        >>> parse_hostfile("a slots=2  # the first\\n\\nb:4\\n", "hosts.txt")
        [ListedHost(name='a', slots=2), ListedHost(name='b', slots=4)]
    """
    lines = ((number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), start=1))
    return _merged((_line(line, f"--hostfile {path}, line {number}") for number, line in lines if line), path)


def _line(line: str, where: str) -> ListedHost:
    name, *more = line.split(None, 1)
    host = _host(name, where, line)
    if rest := _IGNORED.sub("", "".join(more)).strip():
        asked = _SLOTS.fullmatch(rest)
        if asked is None or host.slots is not None:
            raise _error(line, where)
        host = ListedHost(host.name, _positive(asked[1], line, where))
    return host


def _host(word: str, where: str, line: str = "") -> ListedHost:
    match = _HOST.fullmatch(word)
    if match is None:
        raise _error(line or word, where)
    name = match["name"].replace("[", "").replace("]", "")
    return ListedHost(name, None if match["slots"] is None else _positive(match["slots"], line or word, where))


def _positive(digits: str, text: str, where: str) -> int:
    number = int(digits[:9])
    if number < 1:
        raise ListError(f"{where}: {text[:_SHOWN]!r} has no process. Expected: at least 1, or leave the host out.")
    return number


def _error(text: str, where: str) -> ListError:
    return ListError(
        f"{where}: {text[:_SHOWN]!r} is no host. Expected: the name of a host as ssh takes it, of letters, digits and "
        "_ . - %, and how many processes it may have: node-1:8, me@node-1:8 or [2001:db8::1]:8; in a file also node-1 "
        "slots=8."
    )


def _merged(hosts: Iterable[ListedHost], where: str) -> list[ListedHost]:
    """Each host once: one that is named several times has the sum."""
    found: dict[str, list[ListedHost]] = {}
    for host in hosts:
        found.setdefault(host.name, []).append(host)
    if not found:
        raise ListError(f"{where}: it names no host. Expected: one at least, such as node-1:8.")
    return [ListedHost(name, _sum([one.slots for one in named], name, where)) for name, named in found.items()]


def _sum(slots: Sequence[int | None], name: str, where: str) -> int | None:
    numbers = [number for number in slots if number is not None]
    if len(slots) == 1:
        return slots[0]
    if numbers and len(numbers) < len(slots):
        raise ListError(
            f"{where}: {name} stands there with and without a number of processes. Expected: once, such as {name}:8."
        )
    return sum(numbers) or len(slots)
