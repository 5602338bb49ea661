"""The processes of a model that is cut into stages, `tfdist run --stages K --replicas R`. Pure functions only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STAGES, REPLICAS = VARIABLES = ("TFDIST_STAGES", "TFDIST_REPLICAS")


@dataclass(frozen=True)
class Stages:
    """How many parts the model is cut into, and how often each part exists. Each is a process.

    The first process drives all the others, which serve it: only the first one trains for itself, and what it returns
    is the result.

    Attributes:
        stages: parts of the model.
        replicas: copies of the model.

    Example:
        >>> Stages(3, 2).workers, str(Stages(3, 2))
        (6, '2 replicas of 3 stages')
    """

    stages: int
    replicas: int = 1

    @property
    def workers(self) -> int:
        """The number of processes."""
        return self.stages * self.replicas

    def environment(self) -> Mapping[str, str]:
        """What it adds to the environment of each process."""
        return {STAGES: str(self.stages), REPLICAS: str(self.replicas)}

    def __str__(self) -> str:
        stages = f"{self.stages} stage{'' if self.stages == 1 else 's'}"
        return stages if self.replicas == 1 else f"{self.replicas} replicas of {stages}"


def stages_of(
    workers: tuple[int, int] | None, stages: int | None, replicas: int | None, ps: int, chief: bool
) -> Stages | None:
    """What --stages and --replicas ask for.

    Raises:
        ValueError: they contradict the other options.

    Example:
        >>> stages_of(None, 2, None, ps=0, chief=False)
        Stages(stages=2, replicas=1)
    """
    if stages is None:
        if replicas is None:
            return None
        raise ValueError(
            f"--replicas {replicas}: expected --stages K as well. Use -n {replicas} for copies of a whole model."
        )
    parts = Stages(stages, replicas or 1)
    if workers is not None:
        asked = str(workers[0]) if workers[0] == workers[1] else f"{workers[0]}:{workers[1]}"
        raise ValueError(
            f"-n {asked} and --stages {stages}: expected only one of them. "
            f"--stages starts a process for each stage and replica, here {parts.workers}: leave -n out."
        )
    for option, given in ((f"--ps {ps}", ps > 0), ("--chief", chief)):
        if given:
            raise ValueError(
                f"{option} and --stages {stages}: expected only one of them. "
                f"The first of the processes drives the others: leave {option} out."
            )
    return parts
