"""The launchers whose restarts are compared, and how each is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.checkpointing.recovery import RANKS, SAVE_EVERY

HANG_TIMEOUT = 2
# More than there are failures: should one of them cause another, it is not the end.
_RESTARTS = 20
# Training is told to stop long before.
_MOST_STEPS = 100_000


@dataclass(frozen=True)
class Launcher:
    """A launcher and the program that it runs.

    Attributes:
        title: what the table calls it.
        package: what has to be installed for it.
        words: its arguments, given the folder of the run.
        env: variables that only it needs.
    """

    title: str
    package: str
    words: Callable[[Path], list[str]]
    env: Mapping[str, str] = field(default_factory=dict)


def _tfdist(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "tfdist", "run", "-n", str(RANKS), "--cpus-per-worker", "1"),
        *("--max-restarts", str(_RESTARTS), "--hang-timeout", str(HANG_TIMEOUT), "--output", "all"),
        *("--log-dir", str(folder / "logs"), "-m", f"{__package__}.keras_worker"),
        *(str(folder), str(SAVE_EVERY), str(_MOST_STEPS)),
    ]


def _torchrun(folder: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("--max-restarts", str(_RESTARTS), "--log-dir", str(folder / "logs"), "-m", f"{__package__}.torch_worker"),
        *(str(folder), str(SAVE_EVERY), str(_MOST_STEPS), str(HANG_TIMEOUT)),
    ]


_TORCH_ENV = {
    # Without it restarted ranks read the addresses of dead ones and fail (pytorch issue 135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    # gloo otherwise asks for the address of the host's name, which may have none.
    "GLOO_SOCKET_IFNAME": "lo",
}

LAUNCHERS = {
    "tfdist": Launcher("tfdist run", "tfdist", _tfdist),
    "torchrun": Launcher("torchrun, PyTorch DDP (gloo)", "torch", _torchrun, _TORCH_ENV),
}
