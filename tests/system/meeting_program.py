"""A task that finds its cluster, tries whether each address leads to the rank that it should, and writes what it found.

With MEETING_TEST_ALL, it ends only when so many tasks, also of other jobs, have written. The task of the rank
MEETING_TEST_ABSENT does not come.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import tfdist
from tfdist.cluster import sockets
from tfdist.cluster.discovery import find

_TIMEOUT = "MEETING_TEST_TIMEOUT"
_ALL = "MEETING_TEST_ALL"
_ABSENT = "MEETING_TEST_ABSENT"
_ASK_SECONDS = 15.0
_ABSENT_SECONDS = 600.0


def main(folder: Path) -> None:
    found = {"node": os.environ.get("SLURMD_NODENAME", socket.gethostname()), "pid": os.getpid()}
    if _ABSENT in os.environ and find().rank == int(os.environ[_ABSENT]):
        time.sleep(_ABSENT_SECONDS)
    began = time.monotonic()
    try:
        cluster = tfdist.discover(timeout=float(os.environ.get(_TIMEOUT, "30")))
    except tfdist.ClusterError as error:
        write(folder, {**found, "error": str(error), "seconds": time.monotonic() - began})
        sys.exit(3)
    found |= {"rank": cluster.rank, "source": cluster.source, "local": [cluster.local_rank, cluster.local_size]}
    if cluster.is_single_process:
        write(folder, found)
        return
    places = [sockets.split_address(place) for _, _, place in cluster.tasks()]
    # As TensorFlow's server does: over the reservation.
    with sockets.bind_everywhere(places[cluster.rank][1], reuse=True) as listener:
        listener.listen(socket.SOMAXCONN)
        asked = threading.Semaphore(0)
        threading.Thread(target=answer, args=(listener, cluster.rank, asked), daemon=True).start()
        # The others ask at the same time, if they can.
        deadline = time.monotonic() + _ASK_SECONDS + 1.0
        with ThreadPoolExecutor(len(places)) as pool:
            write(folder, {**found, "places": places, "answers": list(pool.map(ask, places))})
        for _ in places:
            asked.acquire(timeout=max(0.0, deadline - time.monotonic()))
    count = int(os.environ.get(_ALL, "0"))
    while len(list(folder.glob("*.json"))) < count:
        time.sleep(0.02)


def answer(listener: socket.socket, rank: int, asked: threading.Semaphore) -> None:
    with contextlib.suppress(OSError):  # closed
        while True:
            guest, _ = listener.accept()
            with guest:
                guest.sendall(str(rank).encode())
            asked.release()


def ask(place: tuple[str, int]) -> int | None:
    """The rank that answers there."""
    deadline = time.monotonic() + _ASK_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(place, timeout=_ASK_SECONDS) as guest:
            return int(guest.recv(16))
        time.sleep(0.05)  # it may not listen yet
    return None


def write(folder: Path, found: dict) -> None:
    path = folder / f"{found['node']}-{found['pid']}.part"
    path.write_text(json.dumps(found))
    path.rename(path.with_suffix(".json"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
