"""`tfdist horovod build` from its options to the wheel."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tfdist.launch.horovod.source import VERSION, BuildError, download, unpack
from tfdist.launch.horovod.toolchain import Toolchain
from tfdist.user_cache import user_cache

_LAST_LINES = 30
_CHECK_SECONDS = 180.0
_CUDA = "import tensorflow as tf; print(tf.sysconfig.get_build_info().get('cuda_version', ''))"


def build(wheel_dir: str | None, force: bool, say: Callable[[str], object]) -> Path:
    """Builds a wheel of Horovod for the installed TensorFlow, and lets two processes try it.

    Args:
        wheel_dir: folder for the wheel; by default one of the user's cache, named after TensorFlow's version.
        force: whether to build even if there is a wheel already.
        say: tells the user how far it is.

    Returns:
        The wheel.

    Raises:
        BuildError: if TensorFlow, a compiler or the source is missing, it does not compile, or what came out of it
            does not add up.
    """
    tensorflow = _tensorflow()
    folder = Path(wheel_dir or default_folder(os.environ, tensorflow)).absolute()
    there = None if force else existing(folder, tensorflow)
    if there is not None:
        say(f"there is one already, for TensorFlow {tensorflow} (--force builds another)")
        return there
    tools = Toolchain.found(os.environ)
    if tools.missing:
        raise BuildError("cannot build Horovod without\n" + "\n".join(f"  {line}" for line in tools.missing))
    with tempfile.TemporaryDirectory(prefix="tfdist-horovod-") as scratch:
        say(f"fetching horovod {VERSION}")
        source = unpack(download(Path(scratch)), Path(scratch))
        cuda = _tensorflow_cuda()
        settings = tools.settings(cuda)
        if tools.cuda and cuda and "HOROVOD_GPU_OPERATIONS" not in settings:
            found = "NCCL was not found" if tools.nccl is None else f"nvcc is that of CUDA {tools.cuda}"
            say(f"without NCCL: {found}, and TensorFlow was built with CUDA {cuda}; sums of GPUs go through the host")
        say(f"building it for TensorFlow {tensorflow} with {_parts(settings)}; this takes some minutes")
        began = time.monotonic()
        _compile(source, Path(scratch, "wheel"), settings, Path(scratch, "build.log"), folder)
        say(f"built in {time.monotonic() - began:.0f} s; two processes try it")
        (built,) = Path(scratch, "wheel").glob("*.whl")
        _check(built, Path(scratch, "installed"))
        folder.mkdir(parents=True, exist_ok=True)
        wheel = folder / built.name
        partial = wheel.with_suffix(f".{os.getpid()}.part")
        partial.write_bytes(built.read_bytes())
        os.replace(partial, wheel)
    return wheel


def default_folder(env: Mapping[str, str], tensorflow: str) -> str:
    """Where wheels are kept: a wheel belongs to one version of TensorFlow, which its name does not tell.

    Example:
        >>> default_folder({"XDG_CACHE_HOME": "/home/me/.cache"}, "2.21.0")
        '/home/me/.cache/tfdist/horovod/tensorflow-2.21.0'
    """
    return os.path.join(user_cache(env), "horovod", f"tensorflow-{tensorflow}")


def existing(folder: Path, tensorflow: str) -> Path | None:
    """A wheel in a folder that fits this Python and a version of TensorFlow, if there is one."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for wheel in sorted(folder.glob(f"horovod-{VERSION}-{python}-*.whl")):
        try:
            with zipfile.ZipFile(wheel) as packed:
                if json.loads(packed.read("horovod/metadata.json")).get("tensorflow") == tensorflow:
                    return wheel
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            continue
    return None


def _tensorflow() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("tensorflow")
    raise BuildError("TensorFlow is not installed, and Horovod is built for one version of it: pip install tensorflow")


def _tensorflow_cuda() -> str:
    """The version of CUDA that TensorFlow was built with, or ""."""
    result = subprocess.run([sys.executable, "-c", _CUDA], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def _parts(settings: Mapping[str, str]) -> str:
    optional = {"HOROVOD_WITH_MPI": "MPI", "HOROVOD_GPU_OPERATIONS": "NCCL"}
    return " and ".join(["Gloo", *(name for setting, name in optional.items() if setting in settings)])


def _compile(source: Path, target: Path, settings: Mapping[str, str], log: Path, kept: Path) -> None:
    words = ("wheel", "--no-build-isolation", "--no-deps", "--verbose", "--wheel-dir", str(target), str(source))
    with log.open("wb") as output:
        code = subprocess.run(
            [sys.executable, "-m", "pip", *words],
            env={**os.environ, **settings},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if code != 0:
        kept.mkdir(parents=True, exist_ok=True)
        text = log.read_text(errors="replace")
        (kept / "build.log").write_text(text)
        last = "\n".join(text.splitlines()[-_LAST_LINES:])
        raise BuildError(f"Horovod did not compile; the whole output is in {kept / 'build.log'}, its end is\n{last}")


def _check(wheel: Path, target: Path) -> None:
    """Installs the wheel aside, and has two processes add up."""
    from tfdist.launch.horovod.allreduce import sum_of_ranks
    from tfdist.testing.local_cluster import LocalRunError, run_local

    words = ("install", "--quiet", "--disable-pip-version-check", "--target", str(target), str(wheel))
    result = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"pip could not install the new wheel:\n{result.stderr.strip()[-2000:]}")
    try:
        results = run_local(sum_of_ranks, workers=2, args=(str(target),), timeout=_CHECK_SECONDS)
    except LocalRunError as error:
        raise BuildError(f"the new wheel does not work:\n{error}") from None
    if results != [3.0, 3.0]:
        raise BuildError(f"the new wheel adds 1 and 2 up to {results} on two processes")
