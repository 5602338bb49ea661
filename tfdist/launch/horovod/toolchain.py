"""What Horovod can be built with on this machine: compiler, CMake, MPI, NCCL."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# Modules that Horovod's setup.py imports, and the distribution each comes from.
_MODULES = {"setuptools": "setuptools", "wheel": "wheel", "packaging": "packaging"}
_NCCL_PLACES = ("/usr/include", "/usr/local/include", "/usr/local/cuda/include")


@dataclass(frozen=True)
class Toolchain:
    """What is there.

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
