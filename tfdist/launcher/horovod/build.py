"""`tfdist horovod build`: from Horovod's published source to a wheel for the installed TensorFlow."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tfdist.atomic_files import write_atomically
from tfdist.user_cache import user_cache

VERSION = "0.28.1"
_ARCHIVE = f"horovod-{VERSION}.tar.gz"
# pip looks at it before it runs anything of the archive.
_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_CMAKE = Path("horovod", "tensorflow", "CMakeLists.txt")
# It includes a header of XLA's that TensorFlow no longer ships. What is in it, all-reduces in functions that XLA
# compiles, exists for GPUs only and is off unless HOROVOD_ENABLE_XLA_OPS is set.
_LEFT_OUT = "xla_mpi_ops.cc"
# Modules that Horovod's setup.py imports, and the distribution each comes from.
_MODULES = {"setuptools": "setuptools", "wheel": "wheel", "packaging": "packaging"}
_NCCL_PLACES = ("/usr/include", "/usr/local/include", "/usr/local/cuda/include")
_LAST_LINES = 30
_CHECK_SECONDS = 180.0
_CUDA = "import tensorflow as tf; print(tf.sysconfig.get_build_info().get('cuda_version', ''))"


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


@dataclass(frozen=True)
class Toolchain:
    """The compilers and libraries that this machine has.

    Attributes:
        missing: what is needed and is not there, one line each, with the remedy.
        mpi: whether MPI's compiler was found, and has what it compiles with.
        nccl: the folder with NCCL's `include/nccl.h`, if there is one.
        cuda: the major version of CUDA's compiler, or "" if there is none.
        path: the PATH in which all was found.
    """

    missing: tuple[str, ...]
    mpi: bool
    nccl: str | None
    cuda: str
    path: str

    @classmethod
    def found(cls, env: Mapping[str, str]) -> Toolchain:
        """Looks on this machine.

        Args:
            env: the environment variables.
        """
        # Tools that pip has installed beside this Python, CMake for one, count too.
        path = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", "")])
        missing = [
            f"{what}: {remedy}"
            for what, names, remedy in (
                ("a C++ compiler", ("g++", "c++", "clang++"), "apt install g++"),
                ("CMake", ("cmake",), "pip install 'cmake<4', or apt install cmake"),
                ("make", ("make",), "apt install make"),
            )
            if not any(shutil.which(name, path=path) for name in names)
        ]
        absent = [name for module, name in _MODULES.items() if importlib.util.find_spec(module) is None]
        if absent:
            missing.append(f"{', '.join(absent)} for Horovod's setup.py: pip install {' '.join(absent)}")
        return cls(tuple(missing), has_mpi(path), nccl_home(env), cuda_version(path), path)

    def settings(self, tensorflow_cuda: str) -> dict[str, str]:
        """The environment variables that tell Horovod's setup.py what to build.

        Args:
            tensorflow_cuda: the version of CUDA that the installed TensorFlow was built with, or "". NCCL is included
                only if the compiler is of the same major version: one process cannot have both.

        Example:
            >>> settings = Toolchain((), mpi=False, nccl=None, cuda="", path="/usr/bin").settings(tensorflow_cuda="")
            >>> settings["HOROVOD_WITH_GLOO"], settings["HOROVOD_WITHOUT_MPI"]
            ('1', '1')
        """
        settings = {
            "PATH": self.path,
            "HOROVOD_WITH_TENSORFLOW": "1",
            "HOROVOD_WITHOUT_PYTORCH": "1",
            "HOROVOD_WITHOUT_MXNET": "1",
            "HOROVOD_WITH_GLOO": "1",
            ("HOROVOD_WITH_MPI" if self.mpi else "HOROVOD_WITHOUT_MPI"): "1",
            # Gloo, which comes with Horovod, asks for a CMake that CMake 4 no longer plays.
            "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
            "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
        }
        if self.nccl is not None and self.cuda and self.cuda == tensorflow_cuda.partition(".")[0]:
            settings |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": self.nccl}
        return settings


def has_mpi(path: str) -> bool:
    """Whether MPI's compiler finds MPI's header: Debian has the one in openmpi-bin, the other in libopenmpi-dev.

    Args:
        path: the PATH to look in.
    """
    compiler = shutil.which("mpicxx", path=path)
    if compiler is None:
        return False
    command, env = [compiler, "-E", "-x", "c++", "-"], {**os.environ, "PATH": path}
    return subprocess.run(command, input=b"#include <mpi.h>\n", env=env, capture_output=True).returncode == 0


def cuda_version(path: str) -> str:
    """The major version of CUDA's compiler, such as "12", or "" if there is none.

    Args:
        path: the PATH to look in.
    """
    compiler = shutil.which("nvcc", path=path)
    if compiler is None:
        return ""
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    release = re.search(r"release (\d+)\.", told)
    return release[1] if release else ""


def nccl_home(env: Mapping[str, str]) -> str | None:
    """The folder with NCCL's `include/nccl.h`, if there is one.

    Example:
        >>> nccl_home({"HOROVOD_NCCL_HOME": "/nowhere"}) != "/nowhere"
        True
    """
    named = [Path(env[name]) / "include" for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if env.get(name)]
    packaged = [Path(folder) / "nvidia" / "nccl" / "include" for folder in sys.path if folder]
    for include in (*named, *map(Path, _NCCL_PLACES), *packaged):
        if (include / "nccl.h").is_file():
            return str(include.parent)
    return None


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
        write_atomically(wheel, built.read_bytes())
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
    from tfdist.launcher.local.local_cluster import LocalRunError, run_local

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


def sum_of_ranks(folder: str) -> float:
    """Runs on each of two processes, with the Horovod that is installed in a folder; returns the sum of 1 and 2."""
    sys.path.insert(0, folder)
    import tensorflow as tf

    from tfdist.cluster.discovery import discover
    from tfdist.strategies.horovod.job import join

    job = join(discover(), None, start_timeout=120.0, peer_timeout=60.0)
    value = job.collectives.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant([job.collectives.rank + 1.0]))
    return float(value[0])
