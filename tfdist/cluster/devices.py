"""Which GPUs each of the processes on a host is to use. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

# By these, Slurm has bound GPUs to tasks: each sees its own, under the same number as the others theirs.
_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")

Device = TypeVar("Device")


def seen(rank: int, env: Mapping[str, str], of_slurm: bool = False) -> str:
    """A text that is equal for two processes on a host if they see the same GPUs.

    Args:
        rank: of the process.
        env: its environment variables.
        of_slurm: whether it is a task of Slurm's: others in a job of Slurm have the variables of what started them.

    Example:
        >>> env = {"SLURM_GPUS_PER_TASK": "1"}
        >>> seen(0, env) == seen(1, env), seen(0, env, of_slurm=True) == seen(1, env, of_slurm=True)
        (True, False)
    """
    per_task = "gpu" in env.get("SLURM_TRES_PER_TASK", "") or any(env.get(name) for name in _PER_TASK)
    binding = env.get("SLURM_GPU_BIND", "").removeprefix("verbose,")
    bound = of_slurm and binding != "none" and (per_task or bool(binding))
    return f"rank {rank}" if bound else env.get("CUDA_VISIBLE_DEVICES", "all")


def own_share(devices: Sequence[Device], local_rank: int, local_size: int) -> list[Device]:
    """The devices of one of the processes that see all of them: equally many each, or one for several processes.

    Args:
        devices: what all of them see.
        local_rank: which of the processes this one is.
        local_size: how many there are.

    Example:
        >>> own_share(["GPU:0", "GPU:1", "GPU:2", "GPU:3"], 1, 2)
        ['GPU:2', 'GPU:3']
        >>> own_share(["GPU:0"], 1, 2)
        ['GPU:0']
    """
    if len(devices) < local_size:
        return [devices[local_rank % len(devices)]] if devices else []
    share = len(devices) // local_size
    return list(devices[local_rank * share : (local_rank + 1) * share])
