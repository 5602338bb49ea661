"""What each process finds out about itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfdist.cluster.rendezvous.addresses import host_name
from tfdist.launch.machine import usable_cores, visible_gpus
from tfdist.launch.versions import versions

# With other versions of these, processes cannot train together, or would not compute the same.
COMPARED = ("tfdist", "tensorflow", "keras", "python")


@dataclasses.dataclass(frozen=True)
class Member:
    """One process of the job.

    Attributes:
        task: its job and index.
        address: its `host:port`.
        host: the name of its host.
        cores: how many cores it may use.
        gpus: how many GPUs it sees.
        versions: by name.
    """

    task: str
    address: str
    host: str
    cores: int
    gpus: int
    versions: dict[str, str]

    @classmethod
    def this_one(cls, task: str, address: str, env: Mapping[str, str]) -> Member:
        """This process."""
        return cls(task, address, host_name(env), len(usable_cores()), len(visible_gpus(env)), versions())


def differing_versions(members: list[Member]) -> list[str]:
    """A line for each version that is not the same everywhere.

    Example:
        >>> one = Member("worker 0", "a:1", "a", 4, 0, {"tensorflow": "2.21.0"})
        >>> other = dataclasses.replace(one, task="worker 1", versions={"tensorflow": "2.20.0"})
        >>> differing_versions([one, other])[0].partition(".")[0]
        'tensorflow is 2'
    """
    problems = []
    for name in COMPARED:
        ranks: dict[str, list[str]] = {}
        for member in members:
            ranks.setdefault(member.versions.get(name, "not installed"), []).append(member.task)
        if len(ranks) > 1:
            listing = ", ".join(f"{version} on {', '.join(tasks[:8])}" for version, tasks in ranks.items())
            problems.append(f"{name} is {listing}. Expected: the same everywhere; install it on those that differ")
    return problems
