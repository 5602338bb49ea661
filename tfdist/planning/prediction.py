"""What is expected of a model under one strategy. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One row of a plan.

    Attributes:
        name: of the strategy, with what matters of its arguments.
        strategy: name of its class in tfdist; empty: none is needed.
        options: its arguments.
        start: how the script is started.
        devices: how many it uses.
        seconds: for a step on the global batch.
        compute: the part of that in which a device computes.
        communication: the part in which devices wait for messages.
        memory: bytes that the fullest device needs.
        available: bytes that a device has.
        sent: bytes that a device sends in a step.
        bubble: the share of time in which the devices of a pipeline wait for each other.
        is_exact: whether it computes what one process does.
        is_sharded: whether the optimizer is a `ShardedOptimizer`.
        mode: what is kept for the backward pass, see `tfdist.memory.MemoryPolicy`.

    Example:
        >>> row = Prediction("one device", "", {}, "python train.py", 1, 0.02, 0.019, 0.0, 10**9, 8 * 10**9)
        >>> row.fits
        True
    """

    name: str
    strategy: str
    options: Mapping[str, Any]
    start: str
    devices: int
    seconds: float
    compute: float
    communication: float
    memory: float
    available: float
    sent: float = 0.0
    bubble: float | None = None
    is_exact: bool = True
    is_sharded: bool = False
    mode: str = "none"

    @property
    def code(self) -> str:
        """The expression that makes the strategy; empty: none is needed.

        Example:
            >>> Prediction("", "MirroredStrategy", {"memory": "swap"}, "", 2, 1.0, 1.0, 0.0, 1.0, 1.0).code
            "tfdist.MirroredStrategy(memory='swap')"
        """
        if not self.strategy:
            return ""
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        sharded = ", with optimizer=tfdist.ShardedOptimizer(...)" if self.is_sharded else ""
        return f"tfdist.{self.strategy}({arguments}){sharded}"

    @property
    def family(self) -> str:
        """The name without what it keeps, how many micro-batches there are, and so on."""
        return self.name.partition(",")[0]

    @property
    def fits(self) -> bool:
        """Whether the memory suffices."""
        return self.memory <= self.available
