"""The optional packages that talk to Kubernetes."""

from __future__ import annotations

import importlib
from types import ModuleType

from tfdist.submit.errors import SubmitError


def load(module: str, package: str) -> ModuleType:
    """Imports a module of the extra "kubernetes".

    Args:
        module: what to import.
        package: what pip calls the package that has it.

    Raises:
        SubmitError: it is not installed.

    Example:
        >>> load("yaml", "PyYAML").safe_dump({"a": 1})
        'a: 1\\n'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SubmitError(
            f"Received: --backend kubernetes without the package {package} ({error}). Expected: tfdist with its extra "
            "for Kubernetes: pip install 'tfdist[kubernetes]'"
        ) from None
