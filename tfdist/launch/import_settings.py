"""Environment variables and the moment at which TensorFlow reads them: when it is imported, or later.

A process that has already imported TensorFlow can become any worker whose environment differs in late variables only.
"""

from __future__ import annotations

from collections.abc import Mapping

# What the launcher gives to each process of a run, and to the processes of a smaller group after a restart. All are
# read when the devices are set up, but OMP_NUM_THREADS, which NumPy's BLAS reads when it is loaded (blas_threads.py).
_OF_ONE_PROCESS = frozenset(
    {"TF_CONFIG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"}
)
_OWN_PREFIX = "TFDIST_"

# What importing TensorFlow, Keras or NumPy can depend on, as far as a running script can still change it.
_IMPORT_PREFIXES = (
    "TF", "XLA_", "KERAS_", "ONEDNN_", "DNNL_", "CUDA_", "NVIDIA_", "NCCL_", "ROCM_", "HIP_", "TPU_", "JAX_",
    "OMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_", "GRPC_", "PROTOCOL_BUFFERS_",
)  # fmt: skip
# Of these: read late, or without effect on anything but the messages.
_LATE_IN_SCRIPTS = (_OF_ONE_PROCESS - {"OMP_NUM_THREADS"}) | {
    "CUDA_DEVICE_ORDER",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_FORCE_GPU_ALLOW_GROWTH",
}
# A script that names the default asks for what it would get anyway.
_DEFAULTS = {"KERAS_BACKEND": "tensorflow"}


def shared_part(env: Mapping[str, str]) -> dict[str, str]:
    """The part of a worker's environment that all workers of a run must have in common to be forked from one process.

    Example:
        >>> shared_part({"TF_CONFIG": "{}", "TFDIST_RESTART": "1", "HOME": "/"})
        {'HOME': '/'}
    """
    return {
        name: value for name, value in env.items() if name not in _OF_ONE_PROCESS and not name.startswith(_OWN_PREFIX)
    }


def changed_for_import(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Names of the variables with which importing TensorFlow could give something else than it gave before.

    Example:
        >>> changed_for_import({"TF_ENABLE_ONEDNN_OPTS": "1"}, {"TF_ENABLE_ONEDNN_OPTS": "0", "WANDB_MODE": "offline"})
        ['TF_ENABLE_ONEDNN_OPTS']
    """
    return sorted(
        name
        for name in {*before, *after}
        if name.startswith(_IMPORT_PREFIXES)
        and not name.startswith(_OWN_PREFIX)
        and name not in _LATE_IN_SCRIPTS
        and before.get(name, _DEFAULTS.get(name)) != after.get(name, _DEFAULTS.get(name))
    )
