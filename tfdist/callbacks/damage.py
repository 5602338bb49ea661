"""Damage: the errors of checkpoints that are not what was written. Uses no TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping


class DamagedCheckpoint(ValueError):
    """A checkpoint's folder does not hold what was written to it.

    Attributes:
        folder: The checkpoint's folder.
        reason: What is wrong with it.
    """

    def __init__(self, folder: str, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"The checkpoint {folder} is damaged: {reason}. Use another checkpoint, and remove this one.")


class DamagedBackups(ValueError):
    """A folder holds checkpoints, but none that can be loaded.

    Attributes:
        directory: The folder.
        reasons: What is wrong with each checkpoint.
    """

    def __init__(self, directory: str, reasons: Mapping[str, str]) -> None:
        self.directory = directory
        self.reasons = dict(reasons)
        lines = "".join(f"\n  {name}: {reason}" for name, reason in reasons.items())
        super().__init__(
            f"{directory} holds {len(reasons)} checkpoint(s), but none that is complete and unaltered:{lines}\n"
            f"To begin the training anew, move the folder away: mv {directory} {directory}.damaged"
        )
