"""What this machine offers to a run: processor cores, GPUs and packages, found without importing TensorFlow."""

from __future__ import annotations

import ipaddress
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from tfdist.cluster.gpus import visible_gpus

_PACKAGES = ("tensorflow", "keras", "numpy")


@dataclass(frozen=True)
class Machine:
    """The cores that this process may run on and the GPUs that it may see.

    Attributes:
        cores: numbers of the usable cores, ascending.
        gpus: what `CUDA_VISIBLE_DEVICES` calls each visible GPU.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...] = ()

    @classmethod
    def this_one(cls, env: Mapping[str, str] | None = None) -> Machine:
        """Looks at the machine that the caller runs on.

        Example:
            >>> len(Machine.this_one({"CUDA_VISIBLE_DEVICES": "0,1"}).gpus)
            2
        """
        return cls(usable_cores(), visible_gpus(os.environ if env is None else env))


def usable_cores() -> tuple[int, ...]:
    """The cores of this process's affinity mask: a container or `taskset` may allow fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def public_addresses() -> tuple[str, ...]:
    """The addresses of this machine at which anyone in the Internet could reach it, unless a firewall is in between."""
    # Its import takes longer than everything else here.
    import psutil

    found = (address.address.partition("%")[0] for all_ in psutil.net_if_addrs().values() for address in all_)
    return tuple(sorted({text for text in found if _is_public(text)}))


def _is_public(text: str) -> bool:
    """Whether this is an IP address that is neither private nor local.

    Example:
        >>> [_is_public(text) for text in ("8.8.8.8", "10.0.0.1", "127.0.0.1", "100.64.0.1", "2600::1", "00:16:3e:01")]
        [True, False, False, False, True, False]
    """
    try:
        return ipaddress.ip_address(text).is_global
    except ValueError:
        return False  # that of an Ethernet card, say


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
