"""Starts the processes that measure, and gets what they have written."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data_parallel.processes import Command, program, result_of
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


def make_environ(environ: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """The environment of every process: the caller's without a cluster or GPUs, then the benchmark's, then `own`.

    Example:
        >>> make_environ({"TF_CONFIG": "{}", "HOME": "/home/a"}, {"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"]
        '2'
    """
    return {**{name: value for name, value in environ.items() if name not in _CLUSTER_VARIABLES}, **_ALWAYS, **own}


def tensorflow_places(addresses: Sequence[str]) -> list[dict[str, str]]:
    """What tells each worker of a cluster who it is."""
    tasks = [{"type": "worker", "index": rank} for rank in range(len(addresses))]
    return [{"TF_CONFIG": json.dumps({"cluster": {"worker": list(addresses)}, "task": task})} for task in tasks]


def torch_places(addresses: Sequence[str], device: str = "lo") -> list[dict[str, str]]:
    """The same for PyTorch. The device is named: gloo otherwise asks for the address of the host's name."""
    host, port = addresses[0].split(":")
    common = {"MASTER_ADDR": host, "MASTER_PORT": port, "WORLD_SIZE": str(len(addresses)), "GLOO_SOCKET_IFNAME": device}
    return [{**common, "RANK": str(rank)} for rank in range(len(addresses))]


@dataclass(frozen=True)
class Children:
    """How processes are started. Each calls `main` of a module with settings: see `benchmarks.worker`.

    Attributes:
        cores: the two cores.
        deadline: seconds that a process may take.
    """

    cores: tuple[int, ...]
    deadline: float

    def python(
        self, module: str, settings: Mapping[str, Any], cores: Sequence[int], env: Mapping[str, str] | None = None
    ) -> Any:
        """Runs a module in one process, on these cores, and returns its result.

        Raises:
            TrialError: if it fails or takes too long.
        """
        environ = make_environ(os.environ, env or {})
        return result_of(
            lambda _, result: [Command(program(module, settings, result), environ, tuple(cores))], self.deadline
        )

    def stages(self, module: str, settings: Mapping[str, Any], stages: int, env: Mapping[str, str]) -> Any:
        """Runs a module by `tfdist run --stages`, and returns the result of its first process.

        With as many cores as stages, each process has one; with fewer, they are not pinned.

        Raises:
            TrialError: if it fails or takes too long.
        """
        return self._launched(("--stages", str(stages)), module, settings, env)

    def workers(
        self,
        module: str,
        settings: Mapping[str, Any],
        env: Mapping[str, str],
        count: int = 2,
        options: Sequence[str] = (),
    ) -> Any:
        """Runs a module by `tfdist run -n`, with more of its options, and returns the result of its first process.

        Two workers have a core each; more are not pinned.

        Raises:
            TrialError: if it fails or takes too long.
        """
        return self._launched(("-n", str(count), *options), module, settings, env)

    def _launched(self, kind: tuple[str, ...], module: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> Any:
        def commands(folder: Path, result: str) -> list[Command]:
            python, *words = program(module, {**settings, "folder": str(folder)}, result)
            launcher = (python, "-m", "tfdist", "run", *kind, "--max-restarts", "0")
            output = ("--grace", "2", "--output", "all", "--log-dir", f"{folder}/logs")
            return [Command((*launcher, *output, *words), make_environ(os.environ, env), self.cores)]

        return result_of(commands, self.deadline)

    def ranks(
        self, module: str, settings: Mapping[str, Any], env: Mapping[str, str] | None = None, count: int = 2
    ) -> Any:
        """Runs a module of PyTorch in processes, in turn on the cores, and returns the result of rank 0.

        Raises:
            TrialError: if it fails or takes too long.
        """
        with reserve(1) as ports:
            places = torch_places([f"127.0.0.1:{ports.ports[0]}"] * count)
            return self.side_by_side(module, settings, [{**(env or {}), **place} for place in places])

    def side_by_side(
        self,
        module: str,
        settings: Mapping[str, Any],
        places: Sequence[Mapping[str, str]],
        namespaces: Sequence[str] = (),
    ) -> Any:
        """Runs a module in processes, in turn on the cores, and returns the result of the first one.

        Args:
            module: what runs.
            settings: of all of them.
            places: the variables of each process.
            namespaces: the network namespace of each, if they have some of their own.

        Raises:
            TrialError: if one fails or takes too long.
        """
        inside = [("ip", "netns", "exec", name) for name in namespaces] or itertools.repeat(())

        def commands(folder: Path, result: str) -> list[Command]:
            words = program(module, {**settings, "folder": str(folder)}, result)
            return [
                Command((*before, *words), make_environ(os.environ, place), (core,))
                for place, before, core in zip(places, inside, itertools.cycle(self.cores), strict=False)
            ]

        return result_of(commands, self.deadline)
