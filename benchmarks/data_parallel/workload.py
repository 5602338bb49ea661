"""What one trial trains, and for how long; it travels to the worker processes as JSON."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Workload:
    """Settings of one trial.

    Attributes:
        model: key of `MODELS`.
        processes: number of worker processes.
        batch: rows of each process in each step; the global batch has `batch * processes` rows.
        warmup: steps before the first window.
        windows: how many times are measured.
        steps: steps of each window.
        steps_per_execution: steps that Keras runs in one call.
        transport: option of `tfdist run`.
        compression: option of the strategy.

    Raises:
        ValueError: if a window would begin or end inside of a call.
    """

    model: str
    processes: int
    batch: int = 64
    warmup: int = 60
    windows: int = 5
    steps: int = 40
    steps_per_execution: int = 1
    transport: str = "auto"
    compression: str | None = None

    def __post_init__(self) -> None:
        for name in ("warmup", "steps"):
            if getattr(self, name) % self.steps_per_execution:
                raise ValueError(
                    f"{name} {getattr(self, name)}: expected a multiple of {self.steps_per_execution}, the steps that "
                    "one call runs. Choose a multiple, or leave out the variant that runs several steps in a call."
                )

    def in_one_process(self) -> Workload:
        """The same training where nothing is communicated."""
        return dataclasses.replace(self, processes=1, transport="auto", compression=None)

    @property
    def is_default(self) -> bool:
        """Whether nothing but the defaults was asked of tfdist."""
        alone = self.in_one_process()
        return self == dataclasses.replace(alone, processes=self.processes) and self.steps_per_execution == 1

    @property
    def global_batch(self) -> int:
        """Rows of all processes in each step."""
        return self.batch * self.processes

    @property
    def total_steps(self) -> int:
        """Steps of the whole training; a few more than are measured, so that the end of `fit` is not in a window."""
        return self.warmup + self.windows * self.steps + self.steps_per_execution
