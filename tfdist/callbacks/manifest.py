"""The manifest of a checkpoint: what a checkpoint's folder must hold, and whether it does. Uses no TensorFlow."""

from __future__ import annotations

import functools
import json
import os
import re
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from tfdist.callbacks.damage import DamagedCheckpoint

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
        DamagedCheckpoint: If a file is missing, cannot be read or was altered.
    """
    try:
        with open_file(os.path.join(folder, MANIFEST_NAME)) as file:
            manifest = decode_manifest(file.read())
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, f"{MANIFEST_NAME} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(folder, f"{MANIFEST_NAME} cannot be read: {error}") from error
    except ValueError as error:
        raise DamagedCheckpoint(folder, str(error)) from error
    for name, expected in manifest.files.items():
        if fault := _file_fault(os.path.join(folder, name), expected, open_file):
            raise DamagedCheckpoint(folder, f"{name} {fault}")
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
