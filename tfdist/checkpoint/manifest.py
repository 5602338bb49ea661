"""The folder of a checkpoint: its name, what its manifest lists, and whether that is there. Uses no TensorFlow."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfdist.json_schema import ANY_OBJECT, anything, check, is_count, read_json
from tfdist.storage import base
from tfdist.storage.base import NOT_A_FILE, entries_of, is_there, patiently

# Whatever a later format changes, it keeps the manifest's name and its field "format": by these it is left alone here.
FORMAT = 1
MANIFEST_NAME = "manifest.json"
# Set by `tfdist drill` for the processes that it starts.
VARIABLE = "TFDIST_DRILL_DIR"

# The checksum is the file's last entry and covers every byte before it, so that no altered bit goes unnoticed.
_MANIFEST_TEXT = re.compile(rb'(\{.*),\n"crc32": "([0-9a-f]{8})"\}\n', re.DOTALL)
_FIELDS = {
    "meta": ANY_OBJECT,
    "files": {...: {"size": is_count, "crc32": is_count}},
    "tensors": {...: {"dtype": str, "shape": [is_count]}},
    **ANY_OBJECT,
}
_NAME = re.compile(r"checkpoint-\d{8,}")
# Large, since a busy Python thread makes this one wait after each chunk.
_CHUNK_BYTES = 8 << 20


class DamagedCheckpointError(ValueError):
    """A checkpoint's folder does not hold what was written to it.

    Attributes:
        reason: What is wrong with it.
    """

    def __init__(self, folder: str, reason: str) -> None:
        self.reason = reason
        super().__init__(f"The checkpoint {folder} is damaged: {reason}. Use another checkpoint, and remove this one.")


class UnknownFormatError(ValueError):
    """A checkpoint of a format that this version of tfdist does not know. It may be intact."""


class UnreadableCheckpointError(OSError):
    """The disk fails where a checkpoint is read. The checkpoint may be intact."""

    def __init__(self, folder: str, reason: str) -> None:
        super().__init__(
            f"The checkpoint {folder} cannot be read, also after {len(base.PAUSES) + 1} attempts: {reason}. It may "
            "be intact: nothing is removed, and no older one is used in its place. Start again once the disk can be "
            "read; or, to go on without this checkpoint, move it to another folder."
        )


class DamagedBackupsError(ValueError):
    """A folder holds checkpoints, but none that can be loaded; the text says what is wrong with each."""


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint: the writer's own data, the files and the tensors in them, as in `_FIELDS`."""

    meta: dict[str, Any]
    files: dict[str, dict[str, int]]
    tensors: dict[str, dict[str, Any]]


def encode_manifest(manifest: Manifest) -> bytes:
    """Returns the manifest as JSON that ends with its own checksum.

    Raises:
        TypeError: If `meta` holds what JSON cannot express.
    """
    body = json.dumps({"format": FORMAT, **vars(manifest)})[:-1].encode()
    return b'%s,\n"crc32": "%08x"}\n' % (body, zlib.crc32(body))


def decode_manifest(content: bytes) -> Manifest:
    """Returns the manifest that `encode_manifest` turned into `content`.

    Raises:
        UnknownFormatError: If it is a manifest, and another version of tfdist wrote it.
        ValueError: If `content` is not a complete, unaltered manifest.
    """
    match = _MANIFEST_TEXT.fullmatch(content)
    if match is None:
        with contextlib.suppress(_NotAsWrittenError):
            _fields_of(content)  # a later format may have its checksum elsewhere
        raise _NotAsWrittenError(f"{MANIFEST_NAME} ({len(content)} bytes) is incomplete or is not a manifest")
    body, expected = match[1], int(match[2], 16)
    if zlib.crc32(body) != expected:
        raise _NotAsWrittenError(f"{MANIFEST_NAME} has the checksum {zlib.crc32(body):08x} instead of {expected:08x}")
    fields = _fields_of(body + b"}")
    for name in fields["files"]:
        # Files are read by these names: they must not lead out of the folder.
        if not (name.isprintable() and len(os.fsencode(name)) <= 255) or "/" in name or name in ("", ".", ".."):
            shown = ascii(name)[:60]
            raise _NotAsWrittenError(
                f"{MANIFEST_NAME} lists a file {shown}, which is not the name of one in its folder"
            )
    return Manifest(fields["meta"], fields["files"], fields["tensors"])


class _NotAsWrittenError(ValueError):
    """Bytes that are no manifest, or a file that is not as it lists."""


def _fields_of(content: bytes) -> dict[str, Any]:
    """What is in a manifest. The format is looked at first: others may have other fields."""
    try:
        fields = read_json(content, {"format": anything, **ANY_OBJECT})
        if type(found := fields["format"]) is int and found == FORMAT:
            check(fields, _FIELDS)
            return fields
    except ValueError as error:
        raise _NotAsWrittenError(f"{MANIFEST_NAME} is not one: {error}") from None
    raise UnknownFormatError(
        f"{MANIFEST_NAME} has the format {ascii(found)[:60]}, and this version of tfdist reads {FORMAT}"
    )


def measure_file(path: str) -> dict[str, int]:
    """Reads a file, and returns its size and its checksum."""
    size = checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return {"size": size, "crc32": checksum}


def read_file(path: str) -> bytes:
    """Returns the content of a small file.

    Raises:
        OSError: If it is missing, or cannot be read after several attempts.
    """
    return patiently(Path(path).read_bytes)


def verify_checkpoint(folder: str, shown: str | None = None) -> Manifest:
    """Returns the manifest of the checkpoint in a folder, after it has compared every file with it.

    Args:
        folder: The checkpoint's own folder, such as `backup/checkpoint-00000012`.
        shown: What messages call the folder, if it is a copy of another one.

    Raises:
        DamagedCheckpointError: If a file is missing or was altered.
        UnknownFormatError: If another version of tfdist wrote it, in a format of its own.
        UnreadableCheckpointError: If the disk fails, again and again. The checkpoint may be intact.
    """
    shown, name = shown or folder, MANIFEST_NAME
    try:
        manifest = decode_manifest(read_file(os.path.join(folder, name)))
        for name, expected in manifest.files.items():
            found = patiently(functools.partial(measure_file, os.path.join(folder, name)))
            if found["size"] != expected["size"]:
                raise _NotAsWrittenError(f"{name} has {found['size']} bytes instead of {expected['size']}")
            if (crc32 := found["crc32"]) != expected["crc32"]:
                raise _NotAsWrittenError(f"{name} has the checksum {crc32:08x} instead of {expected['crc32']:08x}")
    except FileNotFoundError:
        raise DamagedCheckpointError(shown, f"{name} is missing") from None
    except NOT_A_FILE as error:
        raise DamagedCheckpointError(shown, f"{name} cannot be read: {error}") from error
    except OSError as error:
        raise UnreadableCheckpointError(shown, f"{name}: {error}") from error
    except UnknownFormatError as error:
        raise UnknownFormatError(
            f"The checkpoint {shown} is of another version of tfdist: {error}. It is left as it is. Use the version "
            "of tfdist that wrote it; or, to go on without it, move it to another folder."
        ) from None
    except _NotAsWrittenError as error:
        raise DamagedCheckpointError(shown, str(error)) from error
    return manifest


def checkpoint_name(number: int) -> str:
    """Returns the name of a checkpoint's folder.

    >>> checkpoint_name(12)
    'checkpoint-00000012'
    """
    return f"checkpoint-{number:08d}"


def checkpoint_number(name: str) -> int:
    """Returns the number in the name of a checkpoint's folder.

    >>> checkpoint_number("checkpoint-00000012")
    12
    """
    return int(name.removeprefix("checkpoint-"))


def checkpoint_names(entries: Iterable[str]) -> list[str]:
    """Returns which of a folder's entries are named like checkpoints, oldest first.

    >>> checkpoint_names(["checkpoint-00000002/", "logs", "checkpoint-00000001"])
    ['checkpoint-00000001', 'checkpoint-00000002']
    """
    names = (entry.rstrip("/") for entry in entries)
    return sorted(filter(_NAME.fullmatch, names), key=checkpoint_number)


def committed_checkpoints(directory: str) -> list[str]:
    """Returns the names of the completely written checkpoints in a local folder, oldest first."""
    names = checkpoint_names(entries_of(directory))
    return [name for name in names if is_there(os.path.join(directory, name, MANIFEST_NAME))]


def drill_folder(backup_dir: str, env: Mapping[str, str]) -> str | None:
    """The folder to use instead of `backup_dir` in a drill, so that each of its runs has backups of its own.

    Args:
        backup_dir: what the script asked for, local or remote.
        env: the environment of the process.

    Returns:
        A local folder; None if this is no drill.

    Example:
        >>> drill_folder("gs://bucket/backup/", {"TFDIST_DRILL_DIR": "/tmp/drill"})
        '/tmp/drill/backup'
    """
    root = env.get(VARIABLE)
    return os.path.join(root, os.path.basename(os.path.normpath(backup_dir))) if root else None
