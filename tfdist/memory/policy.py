"""Which blocks of a model keep what for their backward pass."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence
from typing import ClassVar

MODES = ("none", "recompute", "park", "swap")


@dataclasses.dataclass(frozen=True)
class MemoryPolicy:
    """How the activations of a model are kept from the forward to the backward pass.

    | mode | kept on the device | kept on the host | in the backward pass |
    |---|---|---|---|
    | `"none"` | everything | nothing | |
    | `"recompute"` | a block's inputs | nothing | the block is run again |
    | `"park"` | nothing | a block's inputs | they are fetched, and the block is run again |
    | `"swap"` | nothing | everything | it is fetched |

    All give the weights of plain training, bit for bit: where a block is run again, its Dropout and BatchNormalization
    see the seeds and statistics of the first time, and nothing is counted twice.

    Args:
        mode: one of the modes, for all blocks; or modes by names of blocks, `{"encoder*": "swap"}`, where names are
            patterns as in a shell, the first that fits counts, and a block that none fits is left alone.
        blocks: what a block is. Names of layers or classes of layers: each such layer is one. "auto": consecutive
            layers of a Functional or Sequential model, cut where that keeps the least (Chen et al., arXiv 1604.06174);
            in other models, the layers of the kind that repeats most.
        host: the device that takes what is parked or swapped.
        prefetch: how many blocks ahead of its use it is fetched; 0 or more.
        min_bytes: tensors that are smaller stay on the device.

    Raises:
        ValueError: for an argument that makes no sense.

    Example:
        >>> MemoryPolicy({"encoder*": "park"}, blocks=["encoder_1", "decoder_1"]).mode_of("encoder_1")
        'park'
    """

    mode: str | Mapping[str, str] = "recompute"
    blocks: str | Sequence[str | type] = "auto"
    host: str = "CPU:0"
    prefetch: int = 1
    min_bytes: int = 1 << 16

    # Which modes there are, and whether weights are on the host, too.
    known: ClassVar[tuple[str, ...]] = MODES
    streams: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for mode in self.modes:
            if mode not in self.known:
                raise ValueError(f"Received: mode={mode!r}. Expected one of {', '.join(map(repr, self.known))}.")
        if isinstance(self.blocks, str) and self.blocks != "auto":
            raise ValueError(f"Received: blocks={self.blocks!r}. Expected: 'auto', or a list: [{self.blocks!r}].")
        if not isinstance(self.prefetch, int) or self.prefetch < 0:
            raise ValueError(f"Received: prefetch={self.prefetch!r}. Expected: a whole number, 0 or more.")
        if self.min_bytes < 0:
            raise ValueError(f"Received: min_bytes={self.min_bytes!r}. Expected: 0 or more.")

    @property
    def modes(self) -> list[str]:
        """The modes that it names."""
        return [self.mode] if isinstance(self.mode, str) else list(self.mode.values())

    def mode_of(self, block: str) -> str:
        """The mode of a block.

        Args:
            block: its name.
        """
        if isinstance(self.mode, str):
            return self.mode
        return next((mode for pattern, mode in self.mode.items() if fnmatch.fnmatchcase(block, pattern)), "none")


def policy_of(given: MemoryPolicy | str | None) -> MemoryPolicy | None:
    """The policy that is meant: a mode stands for a policy with this mode and nothing else.

    Example:
        >>> policy_of("swap").mode
        'swap'
    """
    return MemoryPolicy(given) if isinstance(given, str) else given
