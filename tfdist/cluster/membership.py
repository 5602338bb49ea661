"""Which process of a job this one is, as far as launchers tell: its rank, its task, and its share of the GPUs.

Most launchers tell a process its rank and the number of processes, but not the addresses of the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.variables import SERVERS

# With any of these, Slurm has bound GPUs to tasks: each task sees its own GPUs, under the same numbers as the others.
_PER_TASK = ("SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU")
# By NVIDIA, and the two of AMD.
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
Device = TypeVar("Device")


@dataclass(frozen=True)
class Membership:
    """One process of a job, before it has met the others.

    Attributes:
        rank: Its number, from 0.
        size: How many processes there are.
        source: Who says so, for messages: "Slurm step 17.0".
        job: Differs from that of every other job that may run on the same hosts.
        host: A name or an address of the host of rank 0; `None` if it is not known.
        has_channel: Whether rank 0 tells the others its host through a channel: see `rendezvous`.
        local_rank: Its number among the processes on the same host.
        local_size: How many processes are on the same host.
        own_name: The name by which the others reach this host, if that works better than its address.
        shared_home: Whether the processes usually have the same home folder, where a secret can be kept.

    Raises:
        ClusterError: If the rank is not from 0 to size - 1.

    Example:
        >>> Membership(1, 4, "Slurm step 17.0", "slurm-17.0", host="node-1").rank
        1
    """

    rank: int
    size: int
    source: str
    job: str
    host: str | None = None
    has_channel: bool = False
    local_rank: int | None = None
    local_size: int | None = None
    own_name: str | None = None
    shared_home: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ClusterError(
                f"{self.source}: received rank {self.rank} of {self.size} processes; expected one from 0 to "
                f"{self.size - 1}; correct who sets the two, or set TFDIST_RANK and TFDIST_SIZE"
            )

    @property
    def on_one_host(self) -> bool:
        """Whether all processes are known to be on this host."""
        return self.local_size == self.size

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size}, from {self.source}"


def roles(size: int, servers: int) -> list[tuple[str, int]]:
    """Job and index of each rank: all workers; or, with parameter servers, a chief, the workers, then the servers.

    Args:
        size: How many ranks there are.
        servers: How many of them are parameter servers.

    Raises:
        ClusterError: If no worker is left.

    Example:
        >>> roles(2, servers=0)
        [('worker', 0), ('worker', 1)]
        >>> roles(4, servers=1)
        [('chief', 0), ('worker', 0), ('worker', 1), ('ps', 0)]
    """
    if servers == 0:
        return [("worker", rank) for rank in range(size)]
    workers = size - 1 - servers
    if servers < 0 or workers < 1:
        raise ClusterError(
            f"Received: {SERVERS}={servers} with {size} processes. Expected: a chief, at least one worker and the "
            f"parameter servers, {servers + 2 if servers > 0 else 'a positive number'} or more in all"
        )
    return [
        ("chief", 0),
        *(("worker", index) for index in range(workers)),
        *(("ps", index) for index in range(servers)),
    ]


def visible_devices(rank: int, env: Mapping[str, str], of_slurm: bool = False) -> str:
    """A text that is equal for two processes on a host if they see the same GPUs.

    Args:
        rank: Of the process.
        env: Its environment variables.
        of_slurm: Whether it is a task of Slurm's. Processes that a task has started only inherit its variables.

    Example:
        >>> env = {"SLURM_GPUS_PER_TASK": "1"}
        >>> visible_devices(0, env) == visible_devices(1, env)
        True
        >>> visible_devices(0, env, of_slurm=True) == visible_devices(1, env, of_slurm=True)
        False
    """
    per_task = "gpu" in env.get("SLURM_TRES_PER_TASK", "") or any(env.get(name) for name in _PER_TASK)
    # What the options of srun itself ask for is in the first one only: "gres/gpu:per_task:2".
    given = env.get("SLURMD_TRES_BIND") or env.get("SLURM_GPU_BIND", "")
    binding = given.removeprefix("gres/gpu:").removeprefix("verbose,")
    bound = of_slurm and binding != "none" and (per_task or bool(binding))
    return f"rank {rank}" if bound else "; ".join(env.get(name, "all") for name in _VISIBLE)


def own_share(devices: Sequence[Device], local_rank: int, local_size: int) -> list[Device]:
    """The devices for one of several processes that all see the same ones: equally many each, or shared ones.

    Args:
        devices: What all of the processes see.
        local_rank: Which of the processes this one is.
        local_size: How many processes there are.

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
