"""`tfdist horovod build`: from Horovod's published source to a wheel for the installed TensorFlow."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from tfdist.atomic_files import write_atomically
from tfdist.cluster.programs import output_of
from tfdist.folders import user_cache
from tfdist.supervision.process_folders import process_folder

VERSION = "0.28.1"
# pip looks at it before it runs anything of the archive.
_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_CMAKE = Path("horovod", "tensorflow", "CMakeLists.txt")
# It includes a header of XLA's that TensorFlow no longer ships. What is in it, all-reduces in functions that XLA
# compiles, exists for GPUs only and is off unless HOROVOD_ENABLE_XLA_OPS is set.
_LEFT_OUT = "xla_mpi_ops.cc"
_NCCL_PLACES = ("/usr", "/usr/local", "/usr/local/cuda")
_LAST_LINES = 30
_CHECK_SECONDS = 180.0
_CUDA = "import tensorflow as tf; print(tf.sysconfig.get_build_info().get('cuda_version', ''))"


class BuildError(Exception):
    """Horovod could not be built; the message says why and what to do."""


def fetch(folder: Path) -> Path:
    """Unpacks the published archive, which pip fetches and checks, without XLA; returns the folder with setup.py."""
    wanted = folder / "horovod.txt"
    wanted.write_text(f"horovod=={VERSION} --hash=sha256:{_SHA256}\n")
    words = ("--require-hashes", "--no-binary", ":all:", "--no-deps", "--no-build-isolation", "--quiet")
    _pip("download", *words, "--requirement", str(wanted), "--dest", str(folder))
    with tarfile.open(folder / f"horovod-{VERSION}.tar.gz") as packed:
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


def what_is_missing(path: str) -> list[str]:
    """What the build needs and a PATH, or this Python, does not have: a line each, with the remedy."""
    tools = {
        "a C++ compiler: apt install g++": ("g++", "c++", "clang++"),
        "CMake: pip install 'cmake<4', or apt install cmake": ("cmake",),
        "make: apt install make": ("make",),
    }
    absent = [name for name in ("setuptools", "wheel", "packaging") if importlib.util.find_spec(name) is None]
    return [
        *(line for line, names in tools.items() if not any(shutil.which(name, path=path) for name in names)),
        *(f"{name} for Horovod's setup.py: pip install {name}" for name in absent),
    ]


def settings(path: str, env: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that tell Horovod's setup.py what to build: Gloo, and MPI and NCCL if they are here.

    NCCL is included only if CUDA's compiler has the major version of TensorFlow's CUDA: one process cannot have both.
    """
    with_mpi = output_of(["mpicxx", "-E", "-x", "c++", "-include", "mpi.h", os.devnull], path) is not None
    found = {
        "PATH": path,
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        ("HOROVOD_WITH_MPI" if with_mpi else "HOROVOD_WITHOUT_MPI"): "1",
        # Gloo, which comes with Horovod, asks for a version of CMake that CMake 4 no longer accepts.
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
    }
    nccl = nccl_home(env)
    if nccl and (compiler := re.search(r"release (\d+)\.", output_of(["nvcc", "--version"], path) or "")):
        cuda = (output_of([sys.executable, "-c", _CUDA], path) or "").strip()
        if cuda.partition(".")[0] == compiler[1]:
            found |= {"HOROVOD_GPU_OPERATIONS": "NCCL", "HOROVOD_NCCL_HOME": nccl}
    return found


def nccl_home(env: Mapping[str, str]) -> str | None:
    """The folder with NCCL's `include/nccl.h`, if there is one."""
    named = [Path(env[name]) for name in ("HOROVOD_NCCL_HOME", "NCCL_HOME") if env.get(name)]
    packaged = [Path(folder, "nvidia", "nccl") for folder in sys.path if folder]
    places = (*named, *map(Path, _NCCL_PLACES), *packaged)
    return next((str(place) for place in places if (place / "include" / "nccl.h").is_file()), None)


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"`pip {words[0]}` failed:\n{done.stderr.strip()[-2000:]}")


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
    try:
        tensorflow = importlib.metadata.version("tensorflow")
    except importlib.metadata.PackageNotFoundError:
        raise BuildError("TensorFlow is not installed, and Horovod is built for it: pip install tensorflow") from None
    folder = Path(wheel_dir or default_folder(os.environ, tensorflow)).absolute()
    there = None if force else existing(folder, tensorflow)
    if there is not None:
        say(f"there is one already, for TensorFlow {tensorflow} (--force builds another)")
        return there
    # Tools that pip has installed beside this Python, CMake for one, count too.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    if missing := what_is_missing(path):
        raise BuildError("cannot build Horovod without\n" + "\n".join(f"  {line}" for line in missing))
    with process_folder("horovod") as scratch:
        say(f"fetching horovod {VERSION}")
        source = fetch(scratch)
        chosen = settings(path, os.environ)
        optional = {"HOROVOD_WITH_MPI": "MPI", "HOROVOD_GPU_OPERATIONS": "NCCL"}
        parts = " and ".join(["Gloo", *(name for setting, name in optional.items() if setting in chosen)])
        say(f"building it for TensorFlow {tensorflow} with {parts}; this takes some minutes")
        began = time.monotonic()
        _compile(source, scratch / "wheel", chosen, folder)
        say(f"built in {time.monotonic() - began:.0f} s; two processes try it")
        (built,) = (scratch / "wheel").glob("*.whl")
        _check(built, scratch / "installed")
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


def _compile(source: Path, target: Path, env: Mapping[str, str], kept: Path) -> None:
    """Makes the wheel; if that fails, its whole output is kept in a folder."""
    words = ("wheel", "--no-build-isolation", "--no-deps", "--verbose", "--wheel-dir", str(target), str(source))
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        kept.mkdir(parents=True, exist_ok=True)
        log = kept / "build.log"
        log.write_text(done.stdout)
        last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise BuildError(f"Horovod did not compile; the whole output is in {log}, its end is\n{last}")


def _check(wheel: Path, target: Path) -> None:
    """Installs the wheel aside, and has two processes add up."""
    from tfdist.launcher.local.local_cluster import LocalRunError, run_local

    _pip("install", "--quiet", "--target", str(target), str(wheel))
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

    job = join(discover(), start_timeout=120.0, peer_timeout=60.0)
    value = job.collectives.all_reduce(tf.distribute.ReduceOp.SUM, tf.constant([job.collectives.rank + 1.0]))
    return float(value[0])
