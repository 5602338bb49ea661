"""The files of a search: what tfdist keeps of it in its project and beside the logs, and who holds them."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tfdist.atomic_files import write_atomically
from tfdist.json_schema import ANY_OBJECT, anything, read_json
from tfdist.supervision.events import lock
from tfdist.tuning.member import Member

# In the folder of a project: whose search it is, and what tfdist has to know of its trials.
MARK = "tfdist-search.json"
# How long a process of a search that was just ended may still hold its folder.
_PATIENCE = 3.0
_held: list[BinaryIO] = []


class ProjectMark:
    """What tfdist keeps in the folder of a project. One in which something else stands counts as none.

    Args:
        project: the folder.

    Attributes:
        content: its `id` tells this project from others that were, or will be, in the same folder.
    """

    def __init__(self, project: Path) -> None:
        self._path = project / MARK
        self.content: dict[str, Any] = {"id": secrets.token_hex(4), "search_id": "", "number": 0, "handed": {}}
        schema = {"id": str, "search_id": str, "number": int, "handed": ANY_OBJECT, "stopped_with?": int}
        with contextlib.suppress(OSError, ValueError):
            self.content = read_json(self._path.read_bytes(), {**schema, "failure?": str})

    def is_of(self, search_id: str, number: int) -> bool:
        """Whether the project belongs to a search of this id, and to this or a later call of `search` in its script."""
        return self.content["search_id"] == search_id and self.content["number"] >= number

    def write(self) -> None:
        """Writes it down."""
        write_atomically(self._path, json.dumps(self.content))


def write_search(member: Member, number: int, **content: Any) -> None:
    """Replaces the file beside the logs with what has become of a search, `tfdist-search-1.json`.

    Args:
        member: a process of the search.
        number: which call of `search` in the script it is of; 0: the file is of the whole script.
        **content: the search.

    Raises:
        OSError: it cannot be written.
    """
    whole = {"search_id": member.search_id, "number": number, **content}
    write_atomically(_path_of(Path(member.folder), number), json.dumps(whole, default=str))


def read_search(folder: Path, search_id: str, number: int) -> dict[str, Any] | None:
    """What the file in a folder of logs says of a search; None if there is none, or it is of another search."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(
            _path_of(folder, number).read_bytes(), {"search_id": lambda it: it == search_id, ...: anything}
        )
    return None


def begin_again(folder: Path) -> None:
    """Forgets how the script has ended before, which would end the other tuners at once."""
    with contextlib.suppress(OSError):
        _path_of(folder, 0).unlink()


def searches_in(folder: Path, search_id: str) -> list[dict[str, Any]]:
    """What became of the searches of a script, in their order."""
    found = (read_search(folder, search_id, number) for number in itertools.count(1))
    return list(itertools.takewhile(bool, found))


def _path_of(folder: Path, number: int) -> Path:
    return folder / f"tfdist-search-{number or 'ended'}.json"


def hold(project: Path) -> None:
    """Keeps the folder of a project for the searches of this process.

    Raises:
        OSError: another process searches there.
    """
    what = f"the project folder {project.absolute()}"
    claim(project, ".search.lock", what, "give the tuner another directory= or project_name=")


def claim(folder: Path, name: str, received: str, remedy: str) -> None:
    """Holds a folder, in which only one search may be at work, for this process until its end.

    Args:
        folder: the folder, which exists.
        name: of the file in it that is locked.
        received: what leads to this folder.
        remedy: what the user can change.

    Raises:
        OSError: another process holds it.
    """
    try:
        file = open(folder / name, "ab")  # noqa: SIM115
    except OSError:
        return  # a full disk, say: it goes without
    # Closed, another file of the same name would take the lock with it.
    _held.append(file)
    if not lock(file.fileno(), _PATIENCE):
        raise OSError(
            f"Received: {received}, in which another search is at work. Expected: one search at a time in a "
            f"folder. Wait for that one, end it, or {remedy}"
        )


@contextlib.contextmanager
def turn_of(member: Member) -> Iterator[None]:
    """While no other process of a search reads or writes the oracle's files.

    The lock is in the folder of the logs: a script may remove a project.

    Raises:
        OSError: its disk has no locks.
    """
    with open(Path(member.folder, ".oracle.lock"), "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child that was forked meanwhile has it open, too
