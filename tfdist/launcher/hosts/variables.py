"""Which variables of this machine go to processes on other hosts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

# Variables that say how to compute, and where Python and its libraries are. Others, keys of a cloud among them, belong
# to this host; --env sends one of them on purpose.
_PREFIXES = (
    *("TFDIST_", "TF_", "HOROVOD_", "KERAS_", "XLA_", "CUDA_", "CUDNN_", "NVIDIA_", "NCCL_", "GLOO_", "OMP_", "KMP_"),
    *("TFDS_", "TFHUB_", "MKL_", "GOMP_", "MALLOC_", "PYTHON", "LC_", "UCX_", "FI_"),
)
_NAMES = ("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG", "TZ", "TERM")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Horovod sets them for each process itself, or for this host only.
_OF_THIS_HOST = re.compile(r".*CUDA_VISIBLE_DEVICES|_?HOROVOD_SECRET_KEY")


def travels(name: str, chosen: Collection[str]) -> bool:
    """Whether a variable goes to other hosts.

    Args:
        name: of the variable.
        chosen: those that the user has named by --env.

    Example:
        >>> [travels(name, {"DATA"}) for name in ("TF_CPP_MIN_LOG_LEVEL", "DATA", "AWS_SECRET_ACCESS_KEY")]
        [True, True, False]
    """
    if not _VARIABLE.fullmatch(name) or _OF_THIS_HOST.fullmatch(name):
        return False
    return name in chosen or name in _NAMES or name.startswith(_PREFIXES)


def travelling(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that go to other hosts.

    Example:
        >>> travelling({"OMP_NUM_THREADS": "2", "HOME": "/home/me"})
        {'OMP_NUM_THREADS': '2'}
    """
    return {name: value for name, value in environ.items() if travels(name, ())}
