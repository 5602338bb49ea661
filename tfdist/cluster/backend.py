"""What carries the collectives of `tfdist.MultiWorkerMirroredStrategy`: TensorFlow itself, or Horovod."""

from __future__ import annotations

from collections.abc import Mapping

# Set by `tfdist run --backend` for every process.
VARIABLE = "TFDIST_BACKEND"
TENSORFLOW, HOROVOD = BACKENDS = ("tensorflow", "horovod")


def chosen(env: Mapping[str, str]) -> str:
    """The backend that the environment asks for; TensorFlow's own by default.

    Raises:
        ValueError: if it is none.

    Example:
        >>> chosen({}), chosen({"TFDIST_BACKEND": "horovod"})
        ('tensorflow', 'horovod')
    """
    value = env.get(VARIABLE) or TENSORFLOW
    if value not in BACKENDS:
        raise ValueError(f"Received: {VARIABLE}={value!r}. Expected one of {', '.join(BACKENDS)}; or unset it.")
    return value
