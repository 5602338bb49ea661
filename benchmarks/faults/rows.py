"""The faults of the table: what each of them does, and to which jobs."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.jobs import Job, Plain
from tfdist.checkpoint.manifest import FORMAT, MANIFEST_NAME
from tfdist.launcher.drill.faults import flip_bit, newest_checkpoint, truncate

RUN, PLAIN = "tfdist run", "without it"
Wait = Callable[[Callable[[], object]], None]


@dataclass(frozen=True)
class Row:
    """A fault.

    Attributes:
        name: for the command line.
        title: in the table.
        strike: does it to a job, waiting with the function that it is given; returns when it struck.
        under: the jobs that can have it.
        at_start: whether it strikes while the job starts, which it then does by itself.
        times: how often it strikes one training.
        options: of `tfdist run`.
        ranks: how many processes note steps.
        same_workers: whether all steps have the same number of workers. With another one, sums round in another order,
            so only how far both have come is compared.
    """

    name: str
    title: str
    strike: Callable[[Job, Wait], float]
    under: tuple[str, ...] = (RUN, PLAIN)
    at_start: bool = False
    times: int = 1
    options: tuple[str, ...] = ()
    ranks: int = 2
    same_workers: bool = True


def _at_once(act: Callable[[Any], object]) -> Callable[[Job, Wait], float]:
    """Strikes by what is done to a job."""

    def strike(job: Job, wait: Wait) -> float:
        struck = time.monotonic()
        act(job)
        return struck

    return strike


def _signalled(number: signal.Signals, *ranks: int) -> Callable[[Job, Wait], float]:
    return _at_once(lambda job: [job.signal(rank, number) for rank in ranks])


def _stop(job: Job, wait: Wait) -> float:
    struck = _signalled(signal.SIGSTOP, 1)(job, wait)
    if isinstance(job, Plain):  # nobody but a probe of whoever started it finds it
        wait(lambda: job.has_ended(0, struck))
        job.signal(1, signal.SIGKILL)
    return struck


def _hang(job: Job, wait: Wait) -> float:
    (asked := job.folder / "hang-1").touch()
    wait(lambda: not asked.exists())
    return time.monotonic()


def _with_newest(change: Callable[[Path], None]) -> Callable[[Job, Wait], float]:
    """Changes the newest backup while nobody writes, and kills the chief."""

    def strike(job: Job, wait: Wait) -> float:
        for rank in (0, 1):
            job.signal(rank, signal.SIGSTOP)
        change(newest_checkpoint(job.folder / "backups"))
        struck = time.monotonic()
        job.signal(0, signal.SIGKILL)
        with contextlib.suppress(Exception):  # the launcher may have ended it already
            job.signal(1, signal.SIGCONT)
        return struck

    return strike


def set_format(checkpoint: Path) -> None:
    """Makes a checkpoint one of a later version of tfdist, whose checksums are right."""
    path = checkpoint / MANIFEST_NAME
    body = path.read_bytes().rpartition(b',\n"crc32"')[0]
    fields = json.loads(body + b"}")
    body = json.dumps({**fields, "format": FORMAT + 1})[:-1].encode()
    path.write_bytes(b'%s,\n"crc32": "%08x"}\n' % (body, zlib.crc32(body)))


def _ask_for_read_error(checkpoint: Path) -> None:
    (checkpoint.parents[2] / "read-error").touch()


def _fill_disk(job: Job, wait: Wait) -> float:
    """Leaves ever more room, so that each file of a backup is once the one that does not fit; then kills the chief."""
    backups = job.folder / "backups"
    filler = backups / "filler"
    for left in (0, 4096, 8192, 2**15, 2**17):
        with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            free = os.statvfs(backups)
            os.posix_fallocate(file.fileno(), 0, max(free.f_bavail * free.f_frsize - left, 4096))
        last = job.log.last
        wait(lambda last=last: job.log.last >= last + 12)
        filler.unlink()
    newest = newest_checkpoint(backups)
    wait(lambda: newest_checkpoint(backups) != newest)
    return _signalled(signal.SIGKILL, 0)(job, wait)


def _crash(job: Job, wait: Wait) -> float:
    (asked := job.folder / "crash").touch()
    job.start()
    wait(lambda: not asked.exists())
    return time.monotonic()


def _let_join(job: Job, wait: Wait) -> float:
    """Waits until the other process gives up, and then lets the absent one join."""
    (absent := job.folder / "absent-1").touch()
    job.start()
    struck = time.monotonic()
    wait(lambda: job.has_ended(0, struck))
    absent.unlink()
    return struck


def _free_port(job: Plain, wait: Wait) -> float:
    """Another program listens at a worker's port until the worker has failed."""
    host, port = job.addresses[1].split(":")
    with socket.socket() as other:
        job.free_ports()
        other.bind((host, int(port)))
        other.listen()
        job.start()
        struck = time.monotonic()
        wait(lambda: job.has_ended(1, struck))
    return struck


def _cut(job: Plain, wait: Wait) -> float:
    struck = time.monotonic()
    job.hosts.cut("n10")
    wait(lambda: job.has_ended(0, struck) and job.has_ended(1, struck))
    job.hosts.join("n10")
    return struck


def _cut_at_start(job: Plain, wait: Wait) -> float:
    job.hosts.cut("n10")
    job.start()
    return _cut(job, wait)  # to cut it once more does nothing


def _under(strategy: str, name: str) -> Row:
    """A worker is killed under another strategy."""
    title = f"`kill -9` of a worker under `{strategy}`"
    return Row(name, title, _signalled(signal.SIGKILL, 1), (RUN,), options=("--env", f"STRATEGY={strategy}"))


ROWS = (
    Row("kill-worker", "`kill -9` of a worker", _signalled(signal.SIGKILL, 1), times=3),
    Row("kill-chief", "`kill -9` of the chief", _signalled(signal.SIGKILL, 0), times=3),
    Row("kill-all", "`kill -9` of all at once", _signalled(signal.SIGKILL, 0, 1)),
    Row("kill-launcher", "`kill -9` of the launcher", _at_once(lambda job: job.trial.kill()), (RUN,)),
    Row(
        "kill-server",
        "`kill -9` of a parameter server",
        _at_once(lambda job: job.trial.signal("ps 0", signal.SIGKILL)),
        (RUN,),
        options=("--ps", "1"),
        ranks=1,
    ),
    Row(
        "shrink",
        "`kill -9` of a worker with `-n 1:2`: the other one continues alone",
        _signalled(signal.SIGKILL, 1),
        (RUN,),
        options=("-n", "1:2", "--regrow-after", "inf"),
        ranks=1,
        same_workers=False,
    ),
    Row(
        "grow",
        "the same with `--regrow-after 1`: both train again",
        _signalled(signal.SIGKILL, 1),
        (RUN,),
        options=("-n", "1:2", "--regrow-after", "1"),
        same_workers=False,
    ),
    _under("FullyShardedStrategy", "kill-sharded"),
    _under("LocalStepsStrategy", "kill-local-steps"),
    Row("stop", "SIGSTOP to a worker", _stop),
    Row("hang", "a worker's Python stands still", _hang),
    Row("cut-start", "network cut at the start", _cut_at_start, (PLAIN,), at_start=True),
    Row("cut", "network cut in training", _cut, (PLAIN,)),
    Row("port", "port of a worker taken at the start", _free_port, (PLAIN,), at_start=True),
    Row("disk-full", "disk full at each file of a backup, then `kill -9` of the chief", _fill_disk),
    Row("flip", "one bit of the newest backup altered", _with_newest(flip_bit)),
    Row("truncate", "half of the newest backup cut off", _with_newest(truncate)),
    Row("missing", "newest backup gone, an older one left", _with_newest(shutil.rmtree)),
    Row("newer", "newest backup in the format of a later tfdist", _with_newest(set_format)),
    Row("read-error", "ESTALE once while the backup is read", _with_newest(_ask_for_read_error)),
    Row("term-one", "SIGTERM to a worker", _signalled(signal.SIGTERM, 1)),
    Row("term-all", "SIGTERM to all", _at_once(lambda job: job.terminate())),
    Row("absent", "a worker does not join at the start", _let_join, at_start=True),
    Row("crash", "a worker fails before the first step", _crash, at_start=True),
)
