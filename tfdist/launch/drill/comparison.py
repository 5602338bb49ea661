"""Whether two runs have come to the same end, judged from their last backups."""

from __future__ import annotations

import filecmp
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tfdist.callbacks.checkpoint_name import committed_checkpoints
from tfdist.callbacks.damage import DamagedCheckpoint
from tfdist.callbacks.manifest import MANIFEST_NAME, verify_checkpoint
from tfdist.launch.drill.checkpoint_damage import backup_folders
from tfdist.launch.drill.difference import differences, tensor_name


def compare(reference: Path, other: Path, timeout: float) -> list[str]:
    """What is different between the last backups of two runs; nothing if they are identical to the bit.

    Args:
        reference: folder of the backups of a run that was not disturbed.
        other: folder of those of another one.
        timeout: seconds that a comparison of values may take.

    Raises:
        RuntimeError: if values could not be compared.
    """
    expected, found = (
        [str(folder.relative_to(root)) for folder in backup_folders(root)] for root in (reference, other)
    )
    if expected != found:
        return [f"fits with backups: {expected} in the reference, {found} here"]
    different: list[str] = []
    for name in expected:
        different += _compare_newest(reference / name, other / name, timeout)
    return different


def _compare_newest(reference: Path, other: Path, timeout: float) -> list[str]:
    newest = [folder / committed_checkpoints(str(folder))[-1] for folder in (reference, other)]
    try:
        mine, yours = (verify_checkpoint(str(checkpoint)) for checkpoint in newest)
    except DamagedCheckpoint as error:
        return [str(error)]
    different = differences(mine.meta, yours.meta)
    if not _same_files(newest[0], newest[1], sorted({*mine.files, *yours.files})):
        for tensor, text in _compare_tensors(newest, timeout).items():
            different.append(f"{tensor_name(tensor, mine.meta)}: {text}")
    return different


def _same_files(reference: Path, other: Path, names: Sequence[str]) -> bool:
    assert MANIFEST_NAME not in names
    return filecmp.cmpfiles(reference, other, names, shallow=False)[0] == list(names)


def _compare_tensors(checkpoints: Sequence[Path], timeout: float) -> dict[str, str]:
    """By its name, how each tensor differs; a process of its own reads them with TensorFlow, which takes seconds."""
    command = [sys.executable, "-m", "tfdist.launch.drill.compare_program", *map(str, checkpoints)]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"comparing {checkpoints[0]} with {checkpoints[1]} took more than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{checkpoints[0]} and {checkpoints[1]} cannot be compared: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
