"""Measures this machine, and remembers it."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from tfdist.cluster.devices import own_share
from tfdist.planning.calibration_worker import Measured, measure, measure_horovod
from tfdist.planning.hardware import Device, Hardware, Link
from tfdist.strategies.horovod.installation import problem
from tfdist.testing.local_cluster import LocalRunError, run_local
from tfdist.user_cache import user_cache

_log = logging.getLogger("tfdist")
_SECONDS = 180.0


# Of what a file of measurements means; another number where that changes.
_FORMAT = 3


def this_machine(processes: int | None = None, again: bool = False, cores: Sequence[int] | None = None) -> Hardware:
    """What this machine is: as it was measured before, or measured now, which takes about half a minute.

    Its GPUs are measured where TensorFlow finds some, its cores otherwise: those of one process alone, and of several
    that work at the same time, each with its share of the cores.

    Args:
        processes: how many of them; by default as many as there are GPUs, or cores, and at most 8.
        again: whether to measure even if it is known.
        cores: that may be used; by default those of this process.

    Raises:
        ValueError: for a number of processes that makes no sense.
        tfdist.testing.LocalRunError: if a process of the measurement fails.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"Received: processes={processes}. Expected: at least 1.")
    cores = sorted(os.sched_getaffinity(0) if cores is None else cores)
    processes = min(processes or 8, _most(cores))
    path = _file(len(cores), processes)
    if not again and path.is_file():
        try:
            return Hardware.from_json(path.read_text())
        except ValueError:
            _log.warning("%s cannot be read, and is written anew.", path)
    _log.warning("Measuring this machine with 1 and %d processes; it should have nothing else to do.", processes)
    found = calibrate(cores, processes)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.part")
        partial.write_text(found.to_json())
        os.replace(partial, path)
    except OSError as error:
        _log.warning("What was measured cannot be kept, and will be measured again: %s", error)
    return found


def calibrate(cores: Sequence[int], processes: int) -> Hardware:
    """Measures how fast one process with all cores is, and several with a share of them each.

    Args:
        cores: that may be used.
        processes: how many share them.

    Raises:
        tfdist.testing.LocalRunError: if a process fails.
    """
    (alone,) = _run(measure, 1, [list(cores)])
    every = [alone] if processes == 1 else _run(measure, processes, shares(cores, processes))
    slowest = _slowest(every)
    link = Link(slowest.latency, slowest.bandwidth_of_link) if processes > 1 else Link(1e-4, 1e9)
    devices = {1: _device(alone, 1)}
    if processes > 1 and alone.kind == "CPU":
        devices[processes] = _device(slowest, processes)
    return Hardware(
        f"{platform.node()} ({_described(alone, cores, processes)})",
        alone.kind,
        devices,
        processes,
        link,
        link,
        alone.step,
        slowest.step,
        _horovod(cores, processes, slowest.step),
    )


def shares(cores: Sequence[int], processes: int) -> list[list[int]]:
    """The cores of each process, as `tfdist run` divides them.

    Example:
        >>> shares([0, 1, 2, 3, 4], 2)
        [[0, 1], [2, 3]]
    """
    return [own_share(cores, rank, processes) for rank in range(processes)]


def _run(fn: Callable[..., Any], processes: int, cores: Sequence[Sequence[int]], *more: float) -> list[Any]:
    threads = {"TF_NUM_INTRAOP_THREADS": str(len(cores[0])), "TF_NUM_INTEROP_THREADS": "2"}
    return run_local(fn, workers=processes, args=(cores, *more), timeout=_SECONDS, env=threads)


def _horovod(cores: Sequence[int], processes: int, cluster_step: float) -> Link | None:
    if processes == 1 or problem(importlib.metadata.version("tensorflow")) is not None:
        return None
    try:
        links = _run(measure_horovod, processes, shares(cores, processes), cluster_step)
    except LocalRunError as error:
        _log.warning("Horovod could not be measured, and is left out: %s", error)
        return None
    return Link(max(link.latency for link in links), min(link.bandwidth for link in links))


def _slowest(every: Sequence[Measured]) -> Measured:
    """A step waits for the last one."""
    low = {name: min(getattr(one, name) for one in every) for name in ("flops", "bandwidth", "bandwidth_of_link")}
    high = {name: max(getattr(one, name) for one in every) for name in ("operation", "latency", "step", "reserved")}
    return dataclasses.replace(every[0], **low, **high)


def _device(one: Measured, processes: int) -> Device:
    memory = one.memory if one.kind == "GPU" else _memory_of_machine() // processes
    return Device(one.flops, one.bandwidth, one.operation, memory, one.reserved, one.host_link)


def _memory_of_machine() -> int:
    """What this process may use: a container's limit counts."""
    limits = [psutil.virtual_memory().total]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)


def _described(one: Measured, cores: Sequence[int], processes: int) -> str:
    if one.kind == "GPU":
        return f"{processes} GPUs" if processes > 1 else "1 GPU"
    return f"{len(cores)} cores, of one process or of {processes}" if processes > 1 else f"{len(cores)} cores"


@functools.cache
def count_gpus() -> int:
    import tensorflow as tf

    return len(tf.config.list_physical_devices("GPU"))


def _most(cores: Sequence[int]) -> int:
    return count_gpus() or len(cores)


def _file(cores: int, processes: int) -> Path:
    tensorflow = importlib.metadata.version("tensorflow")
    parts = (
        platform.node(),
        f"{cores}-cores-{count_gpus()}-gpus-{processes}-processes",
        f"tensorflow-{tensorflow}",
        "horovod" if problem(tensorflow) is None else "no-horovod",
        f"{_FORMAT}.json",
    )
    return Path(user_cache(os.environ), "machines", "-".join(parts))
