"""Which blocks of a model keep what for their backward pass."""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

MODES = ("none", "recompute", "recompute+swap", "swap")
AUTOMATIC = "auto"


@dataclasses.dataclass(frozen=True)
class MemoryPolicy:
    """How the activations of a model are kept from the forward to the backward pass.

    | mode | kept on the device | kept on the host | in the backward pass |
    |---|---|---|---|
    | `"none"` | everything | nothing | |
    | `"recompute"` | a block's inputs | nothing | the block is run again |
    | `"recompute+swap"` | nothing | a block's inputs | they are fetched, and the block is run again |
    | `"swap"` | nothing | everything | it is fetched |

    All give the weights of plain training, bit for bit: where a block is run again, its Dropout and BatchNormalization
    see the seeds and statistics of the first time, and nothing is counted twice.

    Args:
        mode: one of the modes, for all blocks; or modes by names of blocks, `{"encoder*": "swap"}`, where names are
            patterns as in a shell, the first that fits counts, and a block that none fits is left alone; or "auto":
            when `fit` or `train_on_batch` knows the batch size, those blocks are run again with which a step fits
            into `budget` for about the least added time, as `tfdist.memory.choose` estimates it.
        blocks: what a block is. Names of layers or classes of layers: each such layer is one. "auto": consecutive
            layers of a Functional or Sequential model, cut where that keeps the least (Chen et al., arXiv 1604.06174);
            in other models, the layers of the kind that repeats most.
        host: the device that takes what is swapped.
        prefetch: how many blocks ahead of its use it is fetched; 0 or more.
        min_bytes: tensors that are smaller stay on the device.
        budget: with "auto", what a device may hold: bytes, or "8GB", "500 MB", "7.5GiB".

    Raises:
        ValueError: for an argument that makes no sense.

    Example:
        >>> MemoryPolicy({"encoder*": "recompute+swap"}, blocks=["encoder_1", "decoder_1"]).mode_of("encoder_1")
        'recompute+swap'
    """

    mode: str | Mapping[str, str] = "recompute"
    blocks: str | Sequence[str | type] = "auto"
    host: str = "CPU:0"
    prefetch: int = 1
    min_bytes: int = 1 << 16
    budget: str | int | None = None

    # Which modes there are, whether weights are elsewhere, and whether there means on other replicas.
    known: ClassVar[tuple[str, ...]] = MODES
    streams: ClassVar[bool] = False
    gathers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.is_automatic != (self.budget is not None):
            raise ValueError(
                f"Received: mode={self.mode!r} and budget={self.budget!r}. Expected: MemoryPolicy('auto', "
                "budget='8GB'), say, or another mode without a budget."
            )
        if self.is_automatic:
            bytes_of_budget(self.budget)
        if not isinstance(self.mode, (str, Mapping)) or not self.modes:
            raise ValueError(
                f"Received: mode={self.mode!r}. Expected: a mode, or modes by names of blocks: {{'encoder*': 'swap'}}."
            )
        for mode in self.modes:
            if mode not in self.known and not self.is_automatic:
                raise ValueError(f"Received: mode={mode!r}. Expected one of {', '.join(map(repr, self.known))}.")
        is_list = isinstance(self.blocks, Collection) and not isinstance(self.blocks, str)
        if self.blocks != "auto" and not (is_list and self.blocks):
            raise ValueError(
                f"Received: blocks={self.blocks!r}. Expected: 'auto', or a list of names or classes of layers."
            )
        for name in ("prefetch", "min_bytes"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 0:
                raise ValueError(f"Received: {name}={getattr(self, name)!r}. Expected: a whole number, 0 or more.")

    @property
    def is_automatic(self) -> bool:
        """Whether the modes are still to be chosen."""
        return self.mode == AUTOMATIC

    def with_modes(self, mode: str | Mapping[str, str]) -> MemoryPolicy:
        """The same with this mode, or these modes by names of blocks, and nothing left to choose."""
        return dataclasses.replace(self, mode=mode, budget=None)

    @property
    def modes(self) -> list[str]:
        """The modes that it names."""
        return [self.mode] if isinstance(self.mode, str) else list(self.mode.values())

    def mode_of(self, block: str) -> str:
        """The mode of the block with this name."""
        if isinstance(self.mode, str):
            return self.mode
        return next((mode for pattern, mode in self.mode.items() if fnmatch.fnmatchcase(block, pattern)), "none")


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


@dataclasses.dataclass(frozen=True)
class GatherPolicy(StreamPolicy):
    """The weights of each block are gathered before it runs, forward and backward, and freed afterwards.

    It is that of `tfdist.FullyShardedStrategy`, whose replicas keep parts of the weights.

    Args:
        mode: "gather"; "gather+keep": what was gathered for the forward pass stays for the backward pass; or
            "gather+recompute": blocks keep their inputs only, and are run again.
        blocks: as in `StreamPolicy`.
        host: is not used.
        prefetch: how many blocks ahead of its use a block's weights are gathered.
        min_bytes: is not used.
    """

    mode: str = "gather"

    known: ClassVar[tuple[str, ...]] = ("gather", "gather+keep", "gather+recompute")
    gathers: ClassVar[bool] = True


def policy_of(given: MemoryPolicy | str | None) -> MemoryPolicy | None:
    """The policy that is meant: a mode stands for a policy with this mode and nothing else.

    Example:
        >>> policy_of("swap").mode
        'swap'
    """
    if given is None or isinstance(given, MemoryPolicy):
        return given
    if isinstance(given, str):
        return MemoryPolicy(given)
    raise ValueError(f"Received: policy={given!r}. Expected: a mode, such as 'recompute', or MemoryPolicy(...).")


def bytes_of_budget(budget: str | int) -> int:
    """The bytes of a number, or of text with a unit of 1000 (kB, MB, GB, TB) or 1024 (KiB, MiB, GiB, TiB).

    Raises:
        ValueError: for anything else.

    Example:
        >>> bytes_of_budget("1.5GB"), bytes_of_budget("1 GiB")
        (1500000000, 1073741824)
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*)\s*([kmgt]?)(i?)b?\s*", str(budget).lower())
    if isinstance(budget, bool) or found is None or not float(found[1]):
        raise ValueError(f"Received: budget={budget!r}. Expected: bytes, such as 8_000_000_000, or '8GB', '7.5GiB'.")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2] or " "))
