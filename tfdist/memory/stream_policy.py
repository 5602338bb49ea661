"""The memory policy of models whose weights are on the host."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from tfdist.memory.policy import MemoryPolicy


@dataclasses.dataclass(frozen=True)
class StreamPolicy(MemoryPolicy):
    """All blocks of a model have their weights and inputs on the host, and are on the device one after the other.

    It is that of `tfdist.HostOffloadStrategy`, which has the variables there: elsewhere it would send them twice.

    Args:
        mode: the only one.
        blocks: as in `MemoryPolicy`; what is in none of the named blocks is streamed, too, in blocks of its own.
        host: where the variables are.
        prefetch: how many blocks ahead of its use something is fetched.
        min_bytes: inputs that are smaller stay on the device.

    Example:
        >>> StreamPolicy(prefetch=2).mode_of("any")
        'stream'
    """

    mode: str = "stream"
    min_bytes: int = 0

    known: ClassVar[tuple[str, ...]] = ("stream",)
    streams: ClassVar[bool] = True
