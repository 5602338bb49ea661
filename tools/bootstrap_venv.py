"""Makes a virtual environment with the newest pip, also where Python came without `ensurepip`.

The pip that comes with Python is as old as that release. From an index that does not tell which Python a file needs, as
plain mirrors do not, pip 22 and 23.0 (Python 3.10) can take a version that needs another one. They then try all
versions of other packages, with no end in sight; a new pip finds the right package at once.

Debian and Ubuntu ship Python's `venv` module with python3 but `ensurepip` only with the package python3-venv, which
takes root to install. Without it this script fetches pip's wheel from the package index that pip is configured for.

Only the standard library is used: it runs with the system's Python, before anything is installed.

Example:
    python3 tools/bootstrap_venv.py .venv
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from package_index import PackageIndex, Wheel, newest_wheel
from pip_settings import read_settings


class BootstrapError(Exception):
    """The virtual environment could not be made; the text says why and what to do."""


def make_venv(folder: Path) -> None:
    """Makes the virtual environment `folder`, with the newest pip; an existing one is made anew.

    Args:
        folder: Where the environment goes.

    Raises:
        BootstrapError: `venv` does not work in this Python, or pip could not be fetched.
    """
    python = folder / "bin" / "python"
    first = _venv(folder)
    if first.returncode == 0:
        upgrade_pip(python)
        return
    bare = _venv(folder, "--without-pip")
    if bare.returncode != 0:
        raise BootstrapError(
            f"{sys.executable} -m venv {folder} failed:\n{bare.stdout.strip()}\n"
            "Install the package python3-venv, or choose another Python: make PYTHON=/path/to/python3"
        )
    install_pip(python)


def upgrade_pip(python: Path) -> None:
    """Brings the pip of `python` up to date; it stays as it is where its index has no newer one, or is out of reach.

    Args:
        python: The interpreter of a virtual environment with pip.

    Raises:
        BootstrapError: pip refuses to install anything.
    """
    done = _run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "pip")
    if done.returncode != 0:
        raise BootstrapError(
            f"pip could not bring itself up to date:\n{done.stdout.strip()}\n"
            f"Mend its configuration, which {python} -m pip config debug shows."
        )


def install_pip(python: Path) -> None:
    """Installs pip for `python` from the package index that pip is configured for.

    Args:
        python: The interpreter of a virtual environment without pip.

    Raises:
        BootstrapError: The index could not be read, has no pip for this Python, or sent another file than it announced.
    """
    settings = read_settings(os.environ, Path.home())
    index = PackageIndex(settings)
    print(f"bootstrap_venv: this Python has no ensurepip; fetching pip from {settings.public_index_url}", flush=True)
    try:
        wheel = newest_wheel(index.wheels("pip"), sys.version_info[:2])
        if wheel is None:
            raise BootstrapError(
                f"{settings.public_index_url} lists no pip wheel with a sha256 for Python "
                f"{sys.version_info[0]}.{sys.version_info[1]}. "
                "Set PIP_INDEX_URL to an index that has one, or install the package python3-venv."
            )
        content = index.download(wheel)
    except (OSError, ValueError) as error:
        raise BootstrapError(
            f"cannot fetch pip from {settings.public_index_url}: {error}. Check the network (or the proxy), "
            "set PIP_INDEX_URL to an index within reach, or install the package python3-venv."
        ) from error
    check_sha256(wheel, content)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / wheel.filename
        path.write_bytes(content)
        # A wheel is a zip file, and Python runs a package out of a zip file: pip installs itself.
        done = _run(str(python), str(path / "pip"), "install", "--quiet", "--no-index", "--no-deps", str(path))
    if done.returncode != 0:
        raise BootstrapError(f"{wheel.filename} could not install itself:\n{done.stdout.strip()}")


def check_sha256(wheel: Wheel, content: bytes) -> None:
    """Makes sure that `content` is the file that the index announced.

    Raises:
        BootstrapError: The digests differ.
    """
    received = hashlib.sha256(content).hexdigest()
    if received != wheel.sha256:
        raise BootstrapError(
            f"{wheel.filename} has sha256 {received}, but the index announced {wheel.sha256}: "
            "the download is damaged or was altered. Try again; if it stays so, ask who runs the index or the proxy."
        )


def main(arguments: Sequence[str]) -> int:
    """Makes the environment named on the command line and returns the exit code."""
    if len(arguments) != 1:
        print("usage: bootstrap_venv.py FOLDER", file=sys.stderr)
        return 2
    try:
        print(f"Making {arguments[0]} with Python {sys.version.split()[0]} and the newest pip", flush=True)
        make_venv(Path(arguments[0]))
    except BootstrapError as error:
        print(f"bootstrap_venv: {error}", file=sys.stderr)
        return 1
    return 0


def _venv(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return _run(sys.executable, "-m", "venv", "--clear", *options, str(folder))


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
