"""`tfdist.auto`: the strategy that a plan recommends."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.barrier import meet
from tfdist.cluster.discovery import discover
from tfdist.launcher.local.local_cluster import run_local
from tfdist.planning.calibration import count_gpus, this_machine
from tfdist.planning.hardware import Hardware, hardware_of
from tfdist.planning.plan import plan_for, recommend
from tfdist.planning.prediction import IN_ONE_PROCESS, Prediction
from tfdist.planning.profile import profile_of

_log = logging.getLogger("tfdist")
_SECONDS = 600.0


def auto(
    build: Callable[[], keras.Model],
    batch_size: int | None = None,
    *,
    data: Any = None,
    hardware: Hardware | str | None = None,
    start_timeout: float = 300.0,
) -> Any:
    """Makes the strategy with which a model is expected to train fastest on the devices of this job.

    With one process that is one device, or several GPUs with a replica or a stage on each, or a way to save memory for
    activations or weights. With several processes it is a replica or a stage on each of them. Parameter servers are
    used if the job has some. The first process of the job makes the plan, in another process, and sends it to the
    others.

    Args:
        build: makes the compiled model. The script calls it once more, in `strategy.scope()`.
        batch_size: rows of the global batch.
        data: a batch `(x, y)` of arrays instead, for models without known shapes.
        hardware: as for `tfdist.plan`; by default this machine, which is measured if it was not yet. A job on several
            hosts, or of several processes with GPUs, needs it: their links are not measured.
        start_timeout: how long to wait for the other processes, in seconds.

    Returns:
        A strategy.

    Raises:
        ValueError: if a step of the model cannot be traced, or nothing fits; says what would. Without `hardware`, also
            if this machine cannot be measured, or the job has processes on several hosts, or with a GPU each.
        tfdist.ClusterError: if a process of the job does not come.

    Example:
        >>> import keras, tfdist
        >>> def build():
        ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        ...     return model
        >>> strategy = tfdist.auto(build, 64)
        >>> with strategy.scope():
        ...     model = build()
    """
    import tfdist

    config = discover(timeout=start_timeout)
    if "ps" in config.jobs:
        return tfdist.ParameterServerStrategy(cluster=config, start_timeout=start_timeout)
    place = {"host": platform.node(), "cores": sorted(os.sched_getaffinity(0))}
    places = meet(config, timeout=start_timeout, info=place) if hardware is None else {}
    chosen: dict[str, Any] = {}
    if config.is_chief or config.num_workers == 1:
        chosen = _choose(build, batch_size, data, hardware, places, config.num_workers)
    if config.num_workers > 1:
        chosen = meet(config, timeout=start_timeout + _SECONDS, info=chosen)[0]
    if "error" in chosen:
        raise ValueError(chosen["error"])
    _log.warning("tfdist.auto: %s", chosen["reason"])
    options = {**chosen["options"], **({"cluster": config} if config.num_workers > 1 else {})}
    return getattr(tfdist, chosen["strategy"])(**options)


def _choose(
    build: Callable[[], keras.Model],
    batch_size: int | None,
    data: Any,
    hardware: Hardware | str | None,
    places: Mapping[int, Mapping[str, Any]],
    processes: int,
) -> dict[str, Any]:
    """Name and options of a strategy with a reason, or an error. Only another process initializes TensorFlow."""
    try:
        hardware = _machine(places) if hardware is None else hardware
        env = {"CUDA_VISIBLE_DEVICES": ""} if isinstance(hardware, Hardware) and hardware.kind == "CPU" else {}
        work = (build, batch_size, data, hardware, processes)
        (chosen,) = run_local(_planned, workers=1, args=work, timeout=_SECONDS, env=env)
    except Exception as error:  # of any kind: the other processes wait for the result
        return {"error": str(error)}
    return chosen


def _machine(places: Mapping[int, Mapping[str, Any]]) -> Hardware:
    """The measured hardware of a job, from the hosts and cores of its processes."""
    several = len(places) > 1
    hosts = sorted({place["host"] for place in places.values()})
    remedy = (
        "Expected: tfdist.auto(..., hardware=...) with a name such as 'v100-nvlink', or a tfdist.planning.Hardware: "
        "`tfdist plan --calibrate --save machine.json` measures a host, and `tfdist check` the links."
    )
    if len(hosts) > 1:
        raise ValueError(f"Received: processes on {', '.join(hosts)}, whose links are not known. {remedy}")
    if several and count_gpus():
        raise ValueError(f"Received: {len(places)} processes with GPUs, whose links are not known. {remedy}")
    # Each process may be restricted to a part of the cores; the measurement shares the cores of all of them.
    cores = sorted({core for place in places.values() for core in place["cores"]})
    return this_machine(len(places) if several else None, cores=cores)


def _planned(
    build: Callable[[], keras.Model], batch_size: int | None, data: Any, hardware: Hardware | str, processes: int
) -> dict[str, Any]:
    """What `_choose` returns; runs in a process of its own."""
    try:
        profile = profile_of(build(), batch_size, data)
        hardware = hardware_of(hardware)
        # A single process uses all GPUs that it sees; several processes use one device each.
        most = processes if processes > 1 else max(len(tf.config.list_physical_devices("GPU")), 1)
        one, *others = plan_for(profile, hardware, most).rows
        found = recommend([row for row in (one, *others) if usable(row, processes)], one, how_to_start=False)
    except ValueError as error:
        return {"error": str(error)}
    if found.best is None:
        return {"error": found.reason}
    # Several processes use the devices of the cluster.
    options = {name: value for name, value in found.best.options.items() if processes == 1 or name != "devices"}
    return {"strategy": found.best.strategy or "MirroredStrategy", "options": options, "reason": found.reason}


def usable(row: Prediction, processes: int) -> bool:
    """Whether a job of so many processes can use this row: all of them take part, and the script stays as it is.

    Example:
        >>> row = Prediction("one device", "", {}, "python train.py", 1, 1.0, 1.0, 0.0, 1.0, 2.0)
        >>> usable(row, 1), usable(row, 2)
        (True, False)
    """
    if row.is_sharded or not row.is_exact or row.strategy == "HorovodStrategy":
        return False
    if processes == 1:
        return row.start == IN_ONE_PROCESS
    return row.devices == processes and row.strategy != "MirroredStrategy"
