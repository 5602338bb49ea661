"""Horovod's published source, and the one change to it with which it compiles against today's TensorFlow."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

VERSION = "0.28.1"
_ARCHIVE = f"horovod-{VERSION}.tar.gz"
# pip looks at it before it runs anything of the archive.
_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_CMAKE = Path("horovod", "tensorflow", "CMakeLists.txt")
# It includes a header of XLA's that TensorFlow no longer ships. What is in it, all-reduces in functions that XLA
# compiles, exists for GPUs only and is off unless HOROVOD_ENABLE_XLA_OPS is set.
_LEFT_OUT = "xla_mpi_ops.cc"


class BuildError(Exception):
    """Horovod could not be built; the message says why and what to do."""


def download(folder: Path) -> Path:
    """Fetches the published archive from the configured package index with pip.

    Raises:
        BuildError: if it cannot be fetched, or is not the one that was published.
    """
    wanted = folder / "horovod.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{_SHA256}\n")
    words = ("download", "--require-hashes", "--no-binary", ":all:", "--no-deps", "--no-build-isolation")
    where = ("--requirement", str(wanted), "--dest", str(folder), "--quiet", "--disable-pip-version-check")
    result = subprocess.run([sys.executable, "-m", "pip", *words, *where], capture_output=True, text=True, check=False)
    archive = folder / _ARCHIVE
    if result.returncode != 0 or not archive.is_file():
        raise BuildError(
            f"pip could not download {_ARCHIVE} with the SHA-256 of the published one; look at the package index that "
            f"it is configured with:\n{result.stderr.strip()[-2000:]}"
        )
    return archive


def unpack(archive: Path, folder: Path) -> Path:
    """Unpacks the archive, makes the change, and returns the folder with setup.py."""
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    source = folder / f"horovod-{VERSION}"
    path = source / _CMAKE
    path.write_text(without_xla(path.read_text()))
    return source


def without_xla(text: str) -> str:
    """Horovod's CMakeLists.txt without the line that compiles `xla_mpi_ops.cc`.

    Raises:
        BuildError: if there is not exactly one such line.

    Example:
        >>> without_xla('list(APPEND S "a.cc")\\nlist(APPEND S "xla_mpi_ops.cc")\\n')
        'list(APPEND S "a.cc")\\n'
    """
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if _LEFT_OUT not in line]
    if len(kept) != len(lines) - 1:
        raise BuildError(
            f"Received: a {_CMAKE} with {len(lines) - len(kept)} lines about {_LEFT_OUT}. Expected: one, as in "
            f"Horovod {VERSION}."
        )
    return "".join(kept)
