"""How a process of an elastic job is started on another host, by ssh.

All users of both hosts can read a command line, so the variables, which may be secrets, go through standard input.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Mapping, Sequence

from tfdist.cluster.variables import travels


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
