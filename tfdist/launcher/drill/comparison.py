"""Whether two runs have come to the same end, judged from their last backups.

Values are compared by a process of its own, `python -m tfdist.launcher.drill.comparison REFERENCE OTHER`, which prints
as JSON how each tensor that is not identical differs. It is the only part of the drill with TensorFlow.
"""

from __future__ import annotations

import filecmp
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tfdist.checkpoint.manifest import (
    DamagedCheckpointError,
    UnknownFormatError,
    UnreadableCheckpointError,
    committed_checkpoints,
    verify_checkpoint,
)
from tfdist.launcher.drill.faults import backup_folders

# What a fit has come to, as far as it is not in the tensors. The rest of the meta data says how to go on.
_COUNTERS = ("epoch", "steps", "total", "done", "stopped")


def compare(reference: Path, other: Path, timeout: float, values: bool = True) -> list[str]:
    """What is different between the last backups of two runs; nothing if they are identical to the bit.

    Args:
        reference: folder of the backups of a run that was not disturbed.
        other: folder of those of another one.
        timeout: seconds that a comparison of values may take.
        values: whether to compare more than how far both have come.

    Raises:
        RuntimeError: if values could not be compared.
    """
    expected, found = (
        [str(folder.relative_to(root)) for folder in backup_folders(root)] for root in (reference, other)
    )
    if expected != found:
        return [f"fits with backups: {expected} in the reference, {found} here"]
    names = [(reference / name, other / name) for name in expected]
    return [text for folders in names for text in _compare_newest(*folders, timeout, values)]


def _compare_newest(reference: Path, other: Path, timeout: float, values: bool) -> list[str]:
    newest = [folder / committed_checkpoints(str(folder))[-1] for folder in (reference, other)]
    try:
        mine, yours = (verify_checkpoint(str(checkpoint)) for checkpoint in newest)
    except DamagedCheckpointError as error:
        return [str(error)]
    except (UnknownFormatError, UnreadableCheckpointError) as error:
        raise RuntimeError(f"{newest[0]} and {newest[1]} cannot be compared: {error}") from error
    if not values:
        return counters(mine.meta, yours.meta)
    different = differences(mine.meta, yours.meta)
    names = sorted({*mine.files, *yours.files})
    if filecmp.cmpfiles(*newest, names, shallow=False)[0] != names:
        for tensor, text in _compare_tensors(newest, timeout).items():
            different.append(f"{tensor_name(tensor, mine.meta)}: {text}")
    return different


def _compare_tensors(checkpoints: Sequence[Path], timeout: float) -> dict[str, str]:
    """How each tensor differs, by name. A process of its own reads them with TensorFlow, which takes seconds."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tfdist.launcher.drill.comparison", *map(str, checkpoints)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"comparing {checkpoints[0]} with {checkpoints[1]} took more than {timeout:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"{checkpoints[0]} and {checkpoints[1]} cannot be compared: {done.stderr.strip()[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def differences(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What is different in the meta data of two final checkpoints: counters, and the callbacks with their History.

    Example:
        >>> meta = {"epoch": 2, "steps": 0, "total": 8, "done": True, "stopped": False, "callbacks": []}
        >>> differences(meta, {**meta, "total": 9})
        ['total: 8 in the reference, 9 here']
    """
    classes = ({"callbacks": [entry["class"] for entry in meta["callbacks"]]} for meta in (reference, other))
    found = [*counters(reference, other), *_different(*classes)]
    for mine, yours in zip(reference["callbacks"], other["callbacks"], strict=False):
        found += _different(*(dict(_values(entry["state"], mine["class"])) for entry in (mine, yours)))
    return found


def counters(reference: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """What is different in how far two final checkpoints are."""
    return _different(*({name: meta.get(name) for name in _COUNTERS} for meta in (reference, other)))


def tensor_name(name: str, meta: Mapping[str, Any]) -> str:
    """The name of a tensor for people: the path of its variable, if it is the value of one.

    Example:
        >>> tensor_name("model/0", {"variables": {"model/0": ["dense/kernel", [2, 2], "float32"]}})
        'dense/kernel'
    """
    return meta["variables"].get(name.removeprefix("replicas/"), [name])[0]


def _different(mine: Mapping[str, Any], yours: Mapping[str, Any]) -> list[str]:
    """A line for each value that differs, by how it is written: not a number is equal to itself."""
    texts = [{path: repr(value) for path, value in values.items()} for values in (mine, yours)]
    found = ((path, *(of_one.get(path, "nothing") for of_one in texts)) for path in {**mine, **yours})
    return [f"{path}: {one} in the reference, {other} here" for path, one, other in found if one != other]


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The single values of a callback's state (checkpoint/callback_state.py) by their paths, arrays by their names."""
    if isinstance(value, dict) and "float" in value:
        yield path, float.fromhex(value["float"])
    elif isinstance(value, dict):
        for kind, content in value.items():
            if kind in ("dict", "OrderedDict", "Counter"):
                for key, item in content:
                    yield from _values(item, f"{path}.{json.dumps(key) if isinstance(key, dict) else key}")
            else:
                yield from _values(content, path)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _values(item, f"{path}[{number}]")
    else:
        yield path, value


if TYPE_CHECKING:
    import numpy as np


def _main(folders: list[str]) -> None:
    os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
    from tfdist.checkpoint.store import CheckpointStore

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
