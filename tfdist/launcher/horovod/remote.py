"""How a process of an elastic job is started on another host, by ssh, and which variables it gets from here.

All users of both hosts can read a command line, so the variables, which may be secrets, go through standard input.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence

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


def over_there(
    command: Sequence[str], host: str, env: Mapping[str, str], chosen: Collection[str]
) -> tuple[tuple[str, ...], bytes]:
    """What runs a command on another host, in the same folder.

    Args:
        command: argument vector.
        host: name of the host.
        env: the variables here.
        chosen: names of those that the user has set by --env.

    Returns:
        The argument vector, and what it has to read from its standard input: the variables.
    """
    # Needs Horovod.
    from horovod.runner.common.util.env import is_kubeflow_mpi
    from horovod.runner.util.remote import get_remote_command

    variables = "; ".join(f"export {name}={shlex.quote(env[name])}" for name in env if travels(name, chosen))
    # kubexec.sh passes no input on; it runs in a pod, which has no other users.
    received = variables if is_kubeflow_mpi() else 'eval "$(cat)"'
    script = f"{received}; cd {shlex.quote(os.getcwd())} > /dev/null 2>&1 ; exec {shlex.join(command)} < /dev/null"
    # The user's own shell over there may be another one.
    there = f"exec /bin/sh -c {shlex.quote(script)}"
    words = ("/bin/sh", "-c", get_remote_command(shlex.quote(there), host=shlex.quote(host)))
    return words, b"" if is_kubeflow_mpi() else variables.encode(errors="surrogateescape")
