"""What most launchers tell a process: which one of how many it is. Where the others are, they tell it not."""

from __future__ import annotations

from dataclasses import dataclass

from tfdist.cluster.errors import ClusterError


@dataclass(frozen=True)
class Membership:
    """One process of a job, before it has met the others.

    Attributes:
        rank: its number, from 0.
        size: how many processes there are.
        source: who says so, for messages: "Slurm step 17.0".
        job: tells this job from every other one that may run on the same hosts.
        host: a name or an address of the host that rank 0 is on; `None` if it is not told.
        channel: the module of `tfdist.cluster.channels` by which rank 0 can tell it, if there is one.
        local_rank: its number among those on the same host.
        local_size: how many are on the same host.
        own_name: the name by which the others reach this host, where it is a better one than the address.
        shared_home: whether the processes usually have the same home folder, where a secret can be kept.

    Raises:
        ClusterError: if the rank is none of the size.

    Example:
        >>> Membership(1, 4, "Slurm step 17.0", "slurm-17.0", host="node-1").rank
        1
    """

    rank: int
    size: int
    source: str
    job: str
    host: str | None = None
    channel: str | None = None
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
