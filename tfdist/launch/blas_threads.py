"""The number of threads of NumPy's linear algebra, changed after it was loaded."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


def wanted_threads(env: Mapping[str, str], cores: int) -> int:
    """How many threads OpenBLAS uses in a process with this environment and so many usable cores.

    Example:
        >>> wanted_threads({"OMP_NUM_THREADS": "3"}, cores=8), wanted_threads({}, cores=8)
        (3, 8)
    """
    text = env.get("OMP_NUM_THREADS", "")
    return min(int(text), cores) if text.isdigit() and int(text) > 0 else cores


def set_threads(count: int) -> None:
    """Tells OpenBLAS what it would have found out when it was loaded.

    Raises:
        RuntimeError: there is none, NumPy was built with another library.
    """
    told = False
    for path in _loaded():
        library = ctypes.CDLL(path)
        for name in _SETTERS:
            if setter := getattr(library, name, None):
                setter(ctypes.c_int(count))
                told = True
    if not told:
        raise RuntimeError(
            f"NumPy's BLAS cannot be told to use {count} threads: expected OpenBLAS. "
            "Start a new process with OMP_NUM_THREADS set."
        )


def _loaded() -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/" in line}
    # NumPy's and SciPy's are two.
    return {path for path in paths if "openblas" in Path(path).name and ".so" in path}
