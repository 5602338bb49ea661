"""The installed Horovod: whether it is there, and whether it fits the installed TensorFlow."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path
from typing import Any

_BUILD = "`tfdist horovod build` makes a wheel for the installed TensorFlow, and says how to install it"


def problem(tensorflow: str) -> str | None:
    """Why Horovod cannot be used, or `None`. Imports neither TensorFlow nor Horovod.

    Args:
        tensorflow: the version of TensorFlow that is installed.
    """
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return f"Horovod is not installed. {_BUILD}."
    return _mismatch(Path(spec.origin).with_name("metadata.json"), tensorflow)


def load() -> Any:
    """The module `horovod.tensorflow`.

    Raises:
        ImportError: if Horovod is not installed, or was built for another TensorFlow; says what to do.
    """
    import tensorflow as tf

    if (found := problem(tf.__version__)) is not None:
        raise ImportError(found)
    return importlib.import_module("horovod.tensorflow")


def _mismatch(metadata: Path, tensorflow: str) -> str | None:
    try:
        built = json.loads(metadata.read_text()).get("tensorflow")
    except (OSError, ValueError) as error:
        return f"Received: a Horovod whose {metadata} cannot be read ({error}). {_BUILD}."
    if built is None:
        return f"Received: a Horovod that was built without TensorFlow ({metadata} does not name it). {_BUILD}."
    if built != tensorflow:
        # It was compiled against the other one's C++ interface: it may load, and crash later.
        return (
            f"Received: a Horovod that was built for TensorFlow {built}, and TensorFlow {tensorflow}. "
            f"Expected: the same. {_BUILD}."
        )
    return None
