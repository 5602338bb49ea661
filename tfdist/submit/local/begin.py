"""The beginning of a job's process: it says who it is, once, and becomes `tfdist run`.

    python -m tfdist.submit.local.begin FOLDER ATTEMPT PLACE PLACES

Only the process itself can do that so that there is no moment at which it runs, and nobody knows. A runner that was
killed after it had started one may have a successor that starts the same attempt again: the second one gives up.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from tfdist.launch.machine import visible_gpus
from tfdist.supervision.identity import Identity

# Exit code of the second of two processes that were started for the same attempt.
BEGUN_ALREADY = 75
COMMAND = "command.json"


@dataclass(frozen=True)
class Beginning:
    """Who runs an attempt, since when."""

    process: Identity
    time: float


def beginning_of(folder: Path, attempt: int) -> Beginning | None:
    """The process of an attempt; None while it has not begun."""
    try:
        content = json.loads(_path(folder, attempt).read_text())
    except FileNotFoundError:
        return None
    return Beginning(Identity(**content["process"]), content["time"])


_Item = TypeVar("_Item")


def share(items: Sequence[_Item], place: int, places: int) -> Sequence[_Item]:
    """What one of several jobs that run at the same time gets; all of it where there is not enough for each.

    Example:
        >>> share([0, 1, 2, 3], place=1, places=2), share([0], place=1, places=2)
        ([2, 3], [0])
    """
    if len(items) < places:
        return items
    return items[len(items) * place // places : len(items) * (place + 1) // places]


def main() -> None:
    folder = Path(sys.argv[1])
    attempt, place, places = map(int, sys.argv[2:])
    own = Identity.of(os.getpid())
    assert own is not None
    path = _path(folder, attempt)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(asdict(Beginning(own, time.time()))))
    try:
        os.link(temporary, path)
    except FileExistsError:
        sys.exit(BEGUN_ALREADY)
    finally:
        temporary.unlink()
    command = json.loads((folder / COMMAND).read_text())
    try:
        os.chdir(command["folder"])
        os.sched_setaffinity(0, share(command["cores"], place, places))
        gpus = visible_gpus(command["env"]) if places > 1 else ()
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(share(gpus, place, places))} if gpus else {}
        os.execve(command["words"][0], command["words"], {**command["env"], **visible})
    except OSError as error:
        sys.exit(
            f"tfdist: the job could not be started: {error}. It was submitted in {command['folder']}, with the Python "
            f"{command['words'][0]}: both must still be there"
        )


def _path(folder: Path, attempt: int) -> Path:
    return folder / f"process-{attempt}.json"


if __name__ == "__main__":
    main()
