"""Where the processes of an elastic job run: on this machine, or on another one, by ssh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from horovod.runner.common.util.env import is_exportable
from horovod.runner.util import network
from horovod.runner.util.remote import get_remote_command


def is_here(host: str) -> bool:
    """Whether a name is one of this machine.

    Example:
        >>> is_here("localhost")
        True
    """
    return network.resolve_host_address(host) in network.get_local_host_addresses()


def over_there(command: Sequence[str], host: str, env: Mapping[str, str]) -> tuple[str, ...]:
    """The argument vector that runs a command on another host, in the same folder, as Horovod does."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items() if is_exportable(name))
    there = f"cd {shlex.quote(os.getcwd())} > /dev/null 2>&1 ; env {variables} {shlex.join(command)}"
    return ("/bin/sh", "-c", get_remote_command(shlex.quote(there), host=host))
