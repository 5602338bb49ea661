"""The manifest of a checkpoint: what a checkpoint's folder must hold, and whether it does. Uses no TensorFlow."""

from __future__ import annotations

import functools
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

FORMAT = 1
MANIFEST_NAME = "manifest.json"

OpenFile = Callable[[str], AbstractContextManager[BinaryIO]]
open_local: OpenFile = functools.partial(open, mode="rb")

# The checksum is the file's last entry and covers every byte before it, so that no altered bit goes unnoticed.
_MANIFEST_TEXT = re.compile(rb'(\{.*),\n"crc32": "([0-9a-f]{8})"\}\n', re.DOTALL)
# Large, since a busy Python thread makes this one wait after each chunk.
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class FileRecord:
    """The size and the checksum of one file."""

    size: int
    crc32: int


@dataclass(frozen=True)
class TensorRecord:
    """The type and the shape of one tensor."""

    dtype: str
    shape: list[int]


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint: the writer's own data, the files and the tensors in them."""

    meta: dict[str, Any]
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the manifest as JSON that ends with its own checksum.

    Raises:
        TypeError: If `meta` holds what JSON cannot express.
    """
    fields = {
        "format": FORMAT,
        "meta": manifest.meta,
        "files": {name: asdict(record) for name, record in manifest.files.items()},
        "tensors": {name: asdict(record) for name, record in manifest.tensors.items()},
    }
    try:
        text = json.dumps(fields)
    except TypeError as error:
        raise TypeError(
            f"The meta data of a checkpoint must be JSON (dict, list, str, int, float, bool, None), but {error}. "
            "Convert it, or save it as a tensor."
        ) from error
    body = text[:-1].encode()
    return b'%s,\n"crc32": "%08x"}\n' % (body, zlib.crc32(body))


def decode_manifest(content: bytes) -> Manifest:
    """Returns the manifest that `encode_manifest` turned into `content`.

    Raises:
        ValueError: If `content` is not a complete, unaltered manifest of a known format.
    """
    match = _MANIFEST_TEXT.fullmatch(content)
    if match is None:
        raise ValueError(f"{MANIFEST_NAME} ({len(content)} bytes) is incomplete or is not a manifest")
    body, expected = match[1], int(match[2], 16)
    if zlib.crc32(body) != expected:
        raise ValueError(f"{MANIFEST_NAME} has the checksum {zlib.crc32(body):08x} instead of {expected:08x}")
    fields = json.loads(body + b"}")
    if fields["format"] != FORMAT:
        raise ValueError(
            f"{MANIFEST_NAME} has the format {fields['format']}, and this version of tfdist reads {FORMAT}"
        )
    return Manifest(
        meta=fields["meta"],
        files={name: FileRecord(**record) for name, record in fields["files"].items()},
        tensors={name: TensorRecord(**record) for name, record in fields["tensors"].items()},
    )


def measure_file(path: str, open_file: OpenFile = open_local) -> FileRecord:
    """Reads a file, and returns its size and its checksum."""
    size = checksum = 0
    with open_file(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return FileRecord(size, checksum)


def verify_checkpoint(folder: str, open_file: OpenFile = open_local) -> Manifest:
    """Returns the manifest of the checkpoint in a folder, after it has compared every file with it.

    Args:
        folder: The checkpoint's own folder, such as `backup/checkpoint-00000012`.
        open_file: How to open a file for reading; another than the default for what is not a local path.

    Raises:
        DamagedCheckpointError: If a file is missing, cannot be read or was altered.
    """
    try:
        with open_file(os.path.join(folder, MANIFEST_NAME)) as file:
            manifest = decode_manifest(file.read())
    except FileNotFoundError:
        raise DamagedCheckpointError(folder, f"{MANIFEST_NAME} is missing") from None
    except OSError as error:
        raise DamagedCheckpointError(folder, f"{MANIFEST_NAME} cannot be read: {error}") from error
    except ValueError as error:
        raise DamagedCheckpointError(folder, str(error)) from error
    for name, expected in manifest.files.items():
        if fault := _file_fault(os.path.join(folder, name), expected, open_file):
            raise DamagedCheckpointError(folder, f"{name} {fault}")
    return manifest


def _file_fault(path: str, expected: FileRecord, open_file: OpenFile) -> str | None:
    try:
        found = measure_file(path, open_file)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error}"
    if found.size != expected.size:
        return f"has {found.size} bytes instead of {expected.size}"
    if found.crc32 != expected.crc32:
        return f"has the checksum {found.crc32:08x} instead of {expected.crc32:08x}"
    return None


# The names of checkpoints' folders, such as `checkpoint-00000012`. Uses no TensorFlow.

_NAME = re.compile(r"checkpoint-(\d{8,})")


def checkpoint_name(number: int) -> str:
    """Returns the name of a checkpoint's folder.

    >>> checkpoint_name(12)
    'checkpoint-00000012'
    """
    return f"checkpoint-{number:08d}"


def checkpoint_number(name: str) -> int:
    """Returns the number in the name of a checkpoint's folder.

    Raises:
        ValueError: If it is not such a name.

    >>> checkpoint_number("checkpoint-00000012")
    12
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is not the name of a checkpoint: give one such as {checkpoint_name(12)!r}")
    return int(match[1])


def checkpoint_names(entries: Iterable[str]) -> list[str]:
    """Returns which of a folder's entries are named like checkpoints, oldest first.

    >>> checkpoint_names(["checkpoint-00000002/", "logs", "checkpoint-00000001"])
    ['checkpoint-00000001', 'checkpoint-00000002']
    """
    names = (entry.rstrip("/") for entry in entries)
    return sorted(filter(_NAME.fullmatch, names), key=checkpoint_number)


def committed_checkpoints(directory: str) -> list[str]:
    """Returns the names of the completely written checkpoints in a local folder, oldest first."""
    if not os.path.isdir(directory):
        return []
    names = checkpoint_names(os.listdir(directory))
    return [name for name in names if os.path.exists(os.path.join(directory, name, MANIFEST_NAME))]


# Damage: the errors of checkpoints that are not what was written. Uses no TensorFlow.


class DamagedCheckpointError(ValueError):
    """A checkpoint's folder does not hold what was written to it.

    Attributes:
        folder: The checkpoint's folder.
        reason: What is wrong with it.
    """

    def __init__(self, folder: str, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(f"The checkpoint {folder} is damaged: {reason}. Use another checkpoint, and remove this one.")


class DamagedBackupsError(ValueError):
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
