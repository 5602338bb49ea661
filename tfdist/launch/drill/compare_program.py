"""Compares the tensors of two checkpoints: `python -m tfdist.launch.drill.compare_program REFERENCE OTHER`.

It prints, as JSON, how each tensor that is not identical differs. It is the only part of the drill with TensorFlow.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


def _main(folders: list[str]) -> None:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    from tfdist.callbacks.store import CheckpointStore

    reference, other = (
        CheckpointStore(os.path.dirname(folder), writer=False).open(os.path.basename(folder)).tensors
        for folder in folders
    )
    found: dict[str, str] = {}
    for name in sorted({*reference, *other}):
        if name not in reference or name not in other:
            found[name] = f"only in the {'reference' if name in reference else 'disturbed run'}"
        elif text := _difference(reference[name], other[name]):
            found[name] = text
    print(json.dumps(found))


def _difference(reference: np.ndarray, other: np.ndarray) -> str:
    import numpy as np

    if (reference.dtype, reference.shape) != (other.dtype, other.shape):
        return f"{reference.dtype}{list(reference.shape)} in the reference, {other.dtype}{list(other.shape)} here"
    if reference.dtype == object:
        count = int(np.sum(reference != other))
        return f"{count} of {reference.size} texts differ" if count else ""
    # Bytes: a NaN is equal to itself, and -0.0 is not 0.0.
    size = reference.itemsize
    mine, yours = (np.frombuffer(array.tobytes(), np.uint8).reshape(-1, size) for array in (reference, other))
    different = (mine != yours).any(axis=1)
    if not different.any():
        return ""
    apart = np.abs(reference.astype(np.float64).ravel() - other.astype(np.float64).ravel())[different]
    return f"{int(different.sum())} of {reference.size} values differ, by {apart.max():.3g} at most"


if __name__ == "__main__":
    _main(sys.argv[1:])
