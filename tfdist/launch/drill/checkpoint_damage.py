"""Damages to the files of checkpoints, and finding the checkpoint that they hit."""

from __future__ import annotations

import os
from pathlib import Path

from tfdist.callbacks.checkpoint_name import committed_checkpoints
from tfdist.callbacks.manifest import MANIFEST_NAME


def backup_folders(root: Path) -> list[Path]:
    """The folders below `root`, itself included, that hold complete checkpoints."""
    return sorted(Path(folder) for folder, _, _ in os.walk(root) if committed_checkpoints(folder))


def newest_checkpoint(root: Path) -> Path | None:
    """The folder of the checkpoint that was completed last, in any backup folder below `root`."""
    newest = [folder / committed_checkpoints(str(folder))[-1] for folder in backup_folders(root)]
    return max(newest, key=lambda folder: (folder / MANIFEST_NAME).stat().st_mtime_ns, default=None)


def largest_file(checkpoint: Path) -> Path:
    """The largest file of a checkpoint but its manifest, which is only there once all others are."""
    files = [path for path in checkpoint.iterdir() if path.name != MANIFEST_NAME]
    return max(files, key=lambda path: path.stat().st_size)


def flip_bit(checkpoint: Path) -> None:
    """Alters one bit in the middle of a checkpoint's largest file."""
    with largest_file(checkpoint).open("r+b") as file:
        middle = os.fstat(file.fileno()).st_size // 2
        file.seek(middle)
        (byte,) = file.read(1)
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def truncate(checkpoint: Path) -> None:
    """Cuts a checkpoint's largest file off in its middle."""
    path = largest_file(checkpoint)
    os.truncate(path, path.stat().st_size // 2)
