"""What the numbers were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tfdist.launcher.plan import versions

_PEER_PACKAGES = ("tf_keras", "torch")
_CPU_INFO = Path("/proc/cpuinfo")


def describe(cores: Sequence[int]) -> dict:
    """Processor, cores, load and versions of this machine.

    Args:
        cores: the cores that the workers are pinned to.
    """
    return {
        "cpu": cpu_model(_CPU_INFO.read_text() if _CPU_INFO.exists() else ""),
        "usable_cores": len(os.sched_getaffinity(0)),
        "worker_cores": list(cores),
        "load_before": os.getloadavg()[0],
        "versions": {**versions(), **{package: _version(package) for package in _PEER_PACKAGES}},
    }


def cpu_model(cpu_info: str) -> str:
    """The processor's name in /proc/cpuinfo, or what else is known of it.

    Example:
        >>> cpu_model("processor\\t: 0\\nmodel name\\t: A fast one\\n")
        'A fast one'
    """
    for line in cpu_info.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
