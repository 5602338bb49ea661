"""One trial from its workload to its samples: the processes of each framework and what they are told."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data_parallel.peers import PEERS, Trial
from benchmarks.data_parallel.processes import Command, result_of
from tfdist.cluster.ports import reserve

_ALWAYS = {
    # What `tfdist run` gives to a process with one core, here given to all processes of all frameworks.
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "2",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "PYTHONUNBUFFERED": "1",
}
_CLUSTER_VARIABLES = ("TF_CONFIG", "TFDIST_CLUSTER", "TF_USE_LEGACY_KERAS", "KERAS_BACKEND")


@dataclass(frozen=True)
class Setting:
    """Where and how long trials run.

    Attributes:
        cores: the core of each worker.
        deadline: seconds that a trial may take.
        environ: environment of every process.
    """

    cores: tuple[int, int]
    deadline: float
    environ: Mapping[str, str]


def make_environ(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process: the caller's without a cluster or GPUs, then the benchmark's, then `own`.

    Example:
        >>> make_environ({"TF_CONFIG": "{}", "HOME": "/home/a"}, {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"]
        '2'
    """
    return {**{name: value for name, value in environ.items() if name not in _CLUSTER_VARIABLES}, **_ALWAYS, **own}


def make_commands(
    trial: Trial, setting: Setting, ports: Sequence[int], folder: Path, result: str
) -> tuple[Command, ...]:
    """The processes of a trial; those of tfdist are started by its own launcher, the others here.

    Args:
        trial: what to run.
        setting: where to run it.
        ports: one for each process.
        folder: for the logs of `tfdist run`.
        result: file that the process with rank 0 writes.
    """
    module = f"{__package__}.{PEERS[trial.peer].worker}"
    program = ("-m", module, trial.workload.to_json(), result)
    python = sys.executable
    if trial.workload.processes == 1:
        return (Command((python, *program), setting.environ, setting.cores[:1]),)
    if trial.peer == "tfdist":
        launcher = ("-m", "tfdist", "run", "-n", "2", "--cpus-per-worker", "1", "--grace", "2", "--output", "all")
        words = (python, *launcher, "--transport", trial.workload.transport, "--log-dir", f"{folder}/logs", *program)
        return (Command(words, setting.environ, setting.cores),)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    places = (tensorflow_places if trial.peer == "tf_keras" else torch_places)(addresses)
    return tuple(
        Command((python, *program), {**setting.environ, **place}, (core,))
        for place, core in zip(places, setting.cores, strict=True)
    )


def tensorflow_places(addresses: Sequence[str]) -> list[dict[str, str]]:
    """What tells each worker of a cluster who it is."""
    tasks = [{"type": "worker", "index": rank} for rank in range(len(addresses))]
    return [{"TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": task})} for task in tasks]


def torch_places(addresses: Sequence[str], device: str = "lo") -> list[dict[str, str]]:
    """The same for PyTorch. The device is named: gloo otherwise asks for the address of the host's name."""
    host, port = addresses[0].split(":")
    common = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(len(addresses)), "GLOO_SOCKET_IFNAME": device}
    return [{**common, "RANK": str(rank)} for rank in range(len(addresses))]


def run(trial: Trial, setting: Setting) -> dict:
    """Runs a trial and returns what its rank 0 has written: "samples_ms", "loss", "accuracy" and "cores".

    Raises:
        TrialError: if it fails or takes too long.
        ClusterError: if there are no free ports.
    """
    with reserve(trial.workload.processes) as ports:
        return result_of(functools.partial(make_commands, trial, setting, ports.ports), setting.deadline)
