"""Starts the processes that measure, and gets what they have written."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data_parallel.processes import Command, result_of
from benchmarks.data_parallel.trial import make_environ, torch_places
from tfdist.cluster.ports import reserve


@dataclass(frozen=True)
class Children:
    """How processes are started. Each runs a module with two arguments: settings as JSON, and the file for its result.

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
        words = (sys.executable, "-m", module, json.dumps(settings))
        environ = make_environ(os.environ, env or {})
        return result_of(lambda _, result: [Command((*words, result), environ, tuple(cores))], self.deadline)

    def stages(self, module: str, settings: Mapping[str, Any], stages: int, env: Mapping[str, str]) -> Any:
        """Runs a module by `tfdist run --stages`, and returns the result of its first process.

        With as many cores as stages, each process has one; with fewer, they are not pinned.

        Raises:
            TrialError: if it fails or takes too long.
        """
        return self._launched(("--stages", str(stages)), module, settings, env)

    def workers(self, module: str, settings: Mapping[str, Any], env: Mapping[str, str], count: int = 2) -> Any:
        """Runs a module by `tfdist run -n`, and returns the result of its first process.

        Two workers have a core each; more are not pinned.

        Raises:
            TrialError: if it fails or takes too long.
        """
        return self._launched(("-n", str(count)), module, settings, env)

    def _launched(self, kind: tuple[str, ...], module: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> Any:
        def commands(folder: Path, result: str) -> list[Command]:
            launcher = (sys.executable, "-m", "tfdist", "run", *kind, "--max-restarts", "0")
            output = ("--grace", "2", "--output", "all", "--log-dir", f"{folder}/logs")
            program = ("-m", module, json.dumps({**settings, "folder": str(folder)}), result)
            return [Command((*launcher, *output, *program), make_environ(os.environ, env), self.cores)]

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

            def commands(folder: Path, result: str) -> list[Command]:
                words = (sys.executable, "-m", module, json.dumps({**settings, "folder": str(folder)}), result)
                of_ranks = zip(places, itertools.cycle(self.cores), strict=False)
                return [
                    Command(words, make_environ(os.environ, {**(env or {}), **place}), (core,))
                    for place, core in of_ranks
                ]

            return result_of(commands, self.deadline)
