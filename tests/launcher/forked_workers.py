"""Workers forked from a zygote, and the same ones started afresh, for tests that compare them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.launcher.conftest import SOURCE, wait_until
from tfdist.launcher.warm.zygote import ForkedProcess, Zygote

COMMAND = (sys.executable, "-u", "script.py", "--epochs", "3")
READY = 90.0


class Workers:
    """Starts workers from one zygote, and the same ones afresh; leaves none behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
        (folder / "script.py").write_text("")
        self.zygote = start_zygote(folder, self.env)
        self.started: list[ForkedProcess] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.zygote.close()
        for worker in self.started:
            # 0: still there, since a test has failed. No child of ours any more: everything is well.
            with contextlib.suppress(ChildProcessError):
                if os.waitpid(worker.pid, os.WNOHANG)[0] == 0:
                    os.kill(worker.pid, signal.SIGKILL)
                    worker.wait()

    def start(self, name: str, env: Mapping[str, str] | None = None, cpus: Sequence[int] = ()) -> ForkedProcess:
        with open(self.folder / name, "wb") as output:
            worker = self.zygote.spawn({**self.env, **(env or {})}, cpus, output.fileno())
        self.started.append(worker)
        return worker

    def run(self, script: str, env: Mapping[str, str] | None = None, cpus: Sequence[int] = ()) -> tuple[int, str]:
        """Exit code and output of a forked worker."""
        self.write(script)
        code = wait(self.start("output", env, cpus))
        return code, (self.folder / "output").read_text()

    def run_afresh(self, script: str, env: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Exit code and output of the same worker, started by the interpreter."""
        self.write(script)
        result = subprocess.run(
            COMMAND,
            cwd=self.folder,
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            timeout=60,
        )
        return result.returncode, result.stdout.decode()

    def write(self, script: str) -> None:
        (self.folder / "script.py").write_text(textwrap.dedent(script))


def start_zygote(folder: Path, env: Mapping[str, str]) -> Zygote:
    before = os.getcwd()
    os.chdir(folder)
    try:
        zygote = Zygote(COMMAND, env)
    finally:
        os.chdir(before)
    wait_until(zygote.is_ready, READY, "the zygote")
    return zygote


def wait(worker: ForkedProcess, deadline: float = 60.0) -> int:
    """The returncode, found as the launcher finds it."""

    def ended() -> bool:
        return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    wait_until(ended, deadline, f"the end of process {worker.pid}")
    return worker.wait()
