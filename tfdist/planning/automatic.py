"""`tfdist.auto`: the strategy that a plan recommends."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

import keras

from tfdist.cluster.discovery import discover
from tfdist.cluster.roll_call import meet
from tfdist.planning.hardware import Hardware
from tfdist.planning.prediction import Prediction
from tfdist.planning.starting import IN_ONE_PROCESS
from tfdist.testing.local_cluster import run_local

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
    """Makes the strategy with which a model is expected to train fastest, on what this job has.

    With one process that is one device, several GPUs with a replica or a stage on each, less memory for activations, or
    weights on the host; with several processes, a replica or a stage on each of them, with what fits. Parameter servers
    are used where the job has some. The plan is made in a process of its own, by the first process of the job, which
    tells the others.

    Args:
        build: makes the compiled model. It is called once more, in `strategy.scope()`, by the script.
        batch_size: rows of the global batch.
        data: a batch `(x, y)` of arrays instead, for models that do not tell their shapes.
        hardware: as for `tfdist.plan`; by default this machine is measured, if it is not known. A job on several hosts,
            or of several processes with GPUs, needs it: their links are not measured.
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
    """Name and options of a strategy with a reason, or an error. TensorFlow is used in another process only."""
    try:
        hardware = _machine(places) if hardware is None else hardware
        env = {"CUDA_VISIBLE_DEVICES": ""} if isinstance(hardware, Hardware) and hardware.kind == "CPU" else {}
        work = (build, batch_size, data, hardware, processes)
        (chosen,) = run_local(_planned, workers=1, args=work, timeout=_SECONDS, env=env)
    except Exception as error:  # whatever it is, the other processes wait to hear of it
        return {"error": str(error)}
    return chosen


def _machine(places: Mapping[int, Mapping[str, Any]]) -> Hardware:
    """What a job runs on that knows nothing of it, by the hosts and cores of its processes."""
    from tfdist.planning.calibration import count_gpus, this_machine

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
    # Each process may be kept to its part of the cores; all that they have together is what is shared.
    cores = sorted({core for place in places.values() for core in place["cores"]})
    return this_machine(len(places) if several else None, cores=cores)


def _planned(
    build: Callable[[], keras.Model], batch_size: int | None, data: Any, hardware: Hardware | str, processes: int
) -> dict[str, Any]:
    import tensorflow as tf

    from tfdist.planning.plan import hardware_of, plan_for
    from tfdist.planning.profiling import profile_of
    from tfdist.planning.recommendation import recommend

    try:
        profile = profile_of(build(), batch_size, data)
        hardware = hardware_of(hardware)
        # One process has the GPUs that it sees; several have one device each.
        most = processes if processes > 1 else max(len(tf.config.list_physical_devices("GPU")), 1)
        one, *others = plan_for(profile, hardware, most).rows
        found = recommend([row for row in (one, *others) if usable(row, processes)], one, how_to_start=False)
    except ValueError as error:
        return {"error": str(error)}
    if found.best is None:
        return {"error": found.reason}
    # The devices of several processes are those of the cluster.
    options = {name: value for name, value in found.best.options.items() if processes == 1 or name != "devices"}
    return {"strategy": found.best.strategy or "MirroredStrategy", "options": options, "reason": found.reason}


def usable(row: Prediction, processes: int) -> bool:
    """Whether a job of so many processes can have this row: all of them take part, and the script stays as it is.

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
