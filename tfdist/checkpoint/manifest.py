"""The manifest of a checkpoint: what a checkpoint's folder must hold, and whether it does. Uses no TensorFlow."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tfdist.storage import patience
from tfdist.storage.patience import NOT_A_FILE, entries_of, is_there, patiently

# Whatever a later format changes, it keeps the manifest's name and its field "format": by these it is left alone here.
FORMAT = 1
MANIFEST_NAME = "manifest.json"

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
        UnknownFormatError: If it is a manifest, and another version of tfdist wrote it.
        ValueError: If `content` is not a complete, unaltered manifest.
    """
    match = _MANIFEST_TEXT.fullmatch(content)
    if match is None:
        # A later format may have its checksum elsewhere.
        _check_format(_json_object(content) or {"format": FORMAT})
        raise ValueError(f"{MANIFEST_NAME} ({len(content)} bytes) is incomplete or is not a manifest")
    body, expected = match[1], int(match[2], 16)
    if zlib.crc32(body) != expected:
        raise ValueError(f"{MANIFEST_NAME} has the checksum {zlib.crc32(body):08x} instead of {expected:08x}")
    fields = _json_object(body + b"}")
    if fields is None:
        raise ValueError(f"{MANIFEST_NAME} is not JSON")
    _check_format(fields)
    meta = fields.get("meta")
    if not isinstance(meta, dict):
        raise ValueError(f"{MANIFEST_NAME} has no meta data")
    files = {name: _file_record(name, record) for name, record in _entries(fields, "files")}
    tensors = {name: _tensor_record(name, record) for name, record in _entries(fields, "tensors")}
    return Manifest(meta, files, tensors)


def _json_object(content: bytes) -> dict[str, Any] | None:
    try:
        fields = json.loads(content.decode())  # of bytes, json guesses the encoding, and imports what decodes it
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _check_format(fields: Mapping[str, Any]) -> None:
    if "format" not in fields:
        raise ValueError(f"{MANIFEST_NAME} names no format")
    found = fields["format"]
    if type(found) is not int or found != FORMAT:
        raise UnknownFormatError(
            f"{MANIFEST_NAME} has the format {_short(found)}, and this version of tfdist reads {FORMAT}"
        )


def _entries(fields: Mapping[str, Any], what: str) -> Iterable[tuple[str, Any]]:
    entries = fields.get(what)
    if not isinstance(entries, dict):
        raise ValueError(f"{MANIFEST_NAME} has no list of {what}")
    return entries.items()


def _file_record(name: str, record: Any) -> FileRecord:
    # Files are read by these names: they must not lead out of the folder.
    if not (name.isprintable() and len(os.fsencode(name)) <= 255) or "/" in name or name in ("", ".", ".."):
        raise ValueError(f"{MANIFEST_NAME} lists a file {_short(name)}, which is not the name of one in its folder")
    if not (_has_fields(record, "size", "crc32") and all(map(_is_count, record.values()))):
        raise ValueError(f"{MANIFEST_NAME} does not say size and checksum of {name}")
    return FileRecord(**record)


def _tensor_record(name: str, record: Any) -> TensorRecord:
    is_whole = _has_fields(record, "dtype", "shape") and isinstance(record["dtype"], str)
    if not (is_whole and isinstance(record["shape"], list) and all(map(_is_count, record["shape"]))):
        raise ValueError(f"{MANIFEST_NAME} does not say dtype and shape of the tensor {_short(name)}")
    return TensorRecord(**record)


def _has_fields(record: Any, *names: str) -> bool:
    return isinstance(record, dict) and record.keys() == set(names)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def measure_file(path: str) -> FileRecord:
    """Reads a file, and returns its size and its checksum."""
    size = checksum = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return FileRecord(size, checksum)


def read_file(path: str) -> bytes:
    """Returns the content of a small file.

    Raises:
        OSError: If it is missing, or cannot be read after several attempts.
    """

    def read() -> bytes:
        with open(path, "rb") as file:
            return file.read()

    return patiently(read)


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
    shown = shown or folder
    try:
        manifest = decode_manifest(read_file(os.path.join(folder, MANIFEST_NAME)))
    except FileNotFoundError:
        raise DamagedCheckpointError(shown, f"{MANIFEST_NAME} is missing") from None
    except NOT_A_FILE as error:
        raise DamagedCheckpointError(shown, f"{MANIFEST_NAME} cannot be read: {error}") from error
    except OSError as error:
        raise UnreadableCheckpointError(shown, f"{MANIFEST_NAME}: {error}") from error
    except UnknownFormatError as error:
        raise UnknownFormatError(
            f"The checkpoint {shown} is of another version of tfdist: {error}. It is left as it is. Use the version "
            "of tfdist that wrote it; or, to go on without it, move it to another folder."
        ) from None
    except ValueError as error:
        raise DamagedCheckpointError(shown, str(error)) from error
    for name, expected in manifest.files.items():
        if fault := _file_fault(folder, name, expected, shown):
            raise DamagedCheckpointError(shown, f"{name} {fault}")
    return manifest


def _file_fault(folder: str, name: str, expected: FileRecord, shown: str) -> str | None:
    try:
        found = patiently(lambda: measure_file(os.path.join(folder, name)))
    except FileNotFoundError:
        return "is missing"
    except NOT_A_FILE as error:
        return f"cannot be read: {error}"
    except OSError as error:
        raise UnreadableCheckpointError(shown, f"{name}: {error}") from error
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
    names = checkpoint_names(entries_of(directory))
    return [name for name in names if is_there(os.path.join(directory, name, MANIFEST_NAME))]


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


class UnknownFormatError(ValueError):
    """A checkpoint of a format that this version of tfdist does not know. It may be intact."""


class UnreadableCheckpointError(OSError):
    """The disk fails where a checkpoint is read. The checkpoint may be intact.

    Attributes:
        folder: The checkpoint's folder.
        reason: What fails.
    """

    def __init__(self, folder: str, reason: str) -> None:
        self.folder = folder
        self.reason = reason
        super().__init__(
            f"The checkpoint {folder} cannot be read, also after {len(patience.PAUSES) + 1} attempts: {reason}. It may "
            "be intact: nothing is removed, and no older one is used in its place. Start again once the disk can be "
            "read; or, to go on without this checkpoint, move it to another folder."
        )


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
