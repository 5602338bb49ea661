"""Starts the processes that measure, and gets what they have written."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.data_parallel.processes import Command, run_together
from benchmarks.data_parallel.trial import make_environ
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
        with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
            result = Path(folder, "result.json")
            words = (sys.executable, "-m", module, json.dumps(settings), str(result))
            run_together([Command(words, self._environ(env or {}), tuple(cores))], Path(folder), self.deadline)
            return json.loads(result.read_text())

    def stages(self, module: str, settings: Mapping[str, Any], stages: int, env: Mapping[str, str]) -> Any:
        """Runs a module by `tfdist run --stages`, and returns the result of its first process.

        With as many cores as stages, each process has one; with fewer, they are not pinned.

        Raises:
            TrialError: if it fails or takes too long.
        """
        return self._launched(("--stages", str(stages)), module, settings, env)

    def workers(self, module: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> Any:
        """Runs a module by `tfdist run -n 2`, each worker on a core, and returns the result of its first process.

        Raises:
            TrialError: if it fails or takes too long.
        """
        count = str(len(self.cores))
        return self._launched(("-n", count, "--cpus-per-worker", "1"), module, settings, env)

    def _launched(self, kind: tuple[str, ...], module: str, settings: Mapping[str, Any], env: Mapping[str, str]) -> Any:
        with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder:
            result = Path(folder, "result.json")
            launcher = ("-m", "tfdist", "run", *kind, "--no-warm", "--max-restarts", "0")
            output = ("--grace", "2", "--output", "all", "--log-dir", f"{folder}/logs")
            program = ("-m", module, json.dumps({**settings, "folder": folder}), str(result))
            words = (sys.executable, *launcher, *output, *program)
            run_together([Command(words, self._environ(env), self.cores)], Path(folder), self.deadline)
            return json.loads(result.read_text())

    def ranks(self, module: str, settings: Mapping[str, Any]) -> Any:
        """Runs a module of PyTorch in a process on each core, and returns the result of rank 0.

        Raises:
            TrialError: if it fails or takes too long.
        """
        count = len(self.cores)
        with tempfile.TemporaryDirectory(prefix="tfdist-bench-") as folder, reserve(1) as ports:
            result = Path(folder, "result.json")
            words = (sys.executable, "-m", module, json.dumps({**settings, "folder": folder}), str(result))
            common = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(ports.ports[0]),
                "WORLD_SIZE": str(count),
                # gloo otherwise asks for the address of the host's name, which may have none.
                "GLOO_SOCKET_IFNAME": "lo",
            }
            commands = [
                Command(words, self._environ({**common, "RANK": str(rank)}), (core,))
                for rank, core in enumerate(self.cores)
            ]
            run_together(commands, Path(folder), self.deadline)
            return json.loads(result.read_text())

    def _environ(self, own: Mapping[str, str]) -> dict[str, str]:
        return make_environ(os.environ, own)


def say(text: str) -> None:
    """Progress; to stderr, as stdout is the tables."""
    print(text, file=sys.stderr, flush=True)
