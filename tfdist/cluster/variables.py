"""Reading environment variables; the names of those that several modules use, and which go to other hosts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from tfdist.cluster.errors import ClusterError

# Where rank 0 can be met, set by a person: a host, or host:port.
MEETING = "TFDIST_MEETING"
# A secret of the job.
TOKEN = "TFDIST_TOKEN"
# How many of the ranks are parameter servers.
SERVERS = "TFDIST_PS"
# Names a run of `tfdist run`: a process that has it belongs to that run.
RUN_ID = "TFDIST_RUN_ID"
# What carries the collectives of `tfdist.MultiWorkerMirroredStrategy`; `tfdist run --transport` sets it everywhere.
TRANSPORT_VARIABLE = "TFDIST_TRANSPORT"
AUTO, TENSORFLOW, DIRECT, HOROVOD = TRANSPORTS = ("auto", "tensorflow", "direct", "horovod")

# After how many batches, besides at the end of an epoch, processes compare their weights; 0: never.
CHECK_WEIGHTS = "TFDIST_CHECK_WEIGHTS"

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


def text(env: Mapping[str, str], name: str) -> str:
    """The value of a variable without the white space around it; empty if it is not set."""
    return env.get(name, "").strip()


def number(env: Mapping[str, str], name: str) -> int:
    """The whole number that a variable has.

    Raises:
        ClusterError: If it has none.

    Example:
        >>> number({"RANK": "3"}, "RANK")
        3
    """
    value = optional_number(env, name)
    if value is None:
        raise ClusterError(f"{name} is not set; expected a whole number")
    return value


def optional_number(env: Mapping[str, str], name: str) -> int | None:
    """The whole number that a variable has; `None` if the variable is not set, or empty.

    Raises:
        ClusterError: If it is no whole number.

    Example:
        >>> optional_number({}, "RANK")
    """
    value = text(env, name)
    try:
        return int(value) if value else None
    except ValueError:
        raise ClusterError(f"{name} is {value!r}; expected a whole number") from None


def chosen_transport(env: Mapping[str, str]) -> str:
    """The transport that the environment asks for; by default whichever fits the devices.

    Raises:
        ValueError: If there is no such transport.

    Example:
        >>> chosen_transport({}), chosen_transport({"TFDIST_TRANSPORT": "horovod"})
        ('auto', 'horovod')
    """
    value = env.get(TRANSPORT_VARIABLE) or AUTO
    if value not in TRANSPORTS:
        raise ValueError(
            f"Received: {TRANSPORT_VARIABLE}={value!r}. Expected one of {', '.join(TRANSPORTS)}; or unset it."
        )
    return value


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
