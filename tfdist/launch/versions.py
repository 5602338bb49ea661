"""Versions of the packages that matter, read from their metadata without importing them."""

from __future__ import annotations

import platform
from importlib import metadata

_PACKAGES = ("tensorflow", "keras", "numpy")


def own_version() -> str:
    """The version of tfdist, installed or run from its source."""
    import tfdist

    return tfdist.__version__


def versions() -> dict[str, str]:
    """Versions by name, of the platform, Python and the packages.

    Example:
        >>> sorted(versions())
        ['keras', 'numpy', 'platform', 'python', 'tensorflow', 'tfdist']
    """
    found = {"tfdist": own_version(), "python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
