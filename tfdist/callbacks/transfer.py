"""A checkpoint's folder as bytes, for a process that does not see the disk it lies on."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile

import tensorflow as tf

from tfdist.callbacks import tensor_files
from tfdist.callbacks.manifest import MANIFEST_NAME


def fingerprint(folder: str) -> str:
    """A digest of a checkpoint's manifest, which has the checksums of all its files.

    Raises:
        OSError: If it cannot be read.
    """
    with tensor_files.open_file(os.path.join(folder, MANIFEST_NAME)) as file:
        return hashlib.sha256(file.read()).hexdigest()


def packed(folder: str) -> bytes:
    """A checkpoint's files as one piece, for `unpack`.

    Raises:
        OSError: If they cannot be read.
    """
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive, tensor_files.os_errors():
        for name in tf.io.gfile.listdir(folder):
            with tensor_files.open_file(os.path.join(folder, name)) as file:
                data = file.read()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return content.getvalue()


def unpack(content: bytes, folder: str) -> None:
    """Makes a local folder of what was `packed` elsewhere."""
    os.mkdir(folder)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            with open(os.path.join(folder, os.path.basename(member.name)), "wb") as file:
                file.write(archive.extractfile(member).read())
