"""The options of `tfdist run` that name other hosts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import click

from tfdist.launcher.arguments import FILE, Target

_HOSTS_HELP = (
    "Run on these hosts, which are reached by ssh: HOST, or HOST:PROCESSES, separated by commas.  "
    "[default of PROCESSES: a host's number of GPUs; 1 without GPUs]"
)
_HOSTFILE_HELP = "The same from a file, with a line for each host: HOST, HOST:8 or HOST slots=8; # begins a comment."
_SSH_HELP = "How to call ssh, with options: 'ssh -F my_config'."
_PYTHON_HELP = "Python of the other hosts.  [default: the path of this one]"
_ONLY_WITH_HOSTS = ("ssh", "remote_python")


def hosts_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Gives a command these options."""
    for decorate in (
        click.option("--remote-python", metavar="PATH", help=_PYTHON_HELP),
        click.option("--ssh", metavar="COMMAND", default="ssh", show_default=True, help=_SSH_HELP),
        click.option("--hostfile", metavar="FILE", type=FILE, help=_HOSTFILE_HELP),
        click.option("--hosts", metavar="HOST:N,...", help=_HOSTS_HELP),
    ):
        command = decorate(command)
    return command


def run_anywhere(target: Target, given: Collection[str], options: dict[str, Any]) -> int:
    """Runs a program on the hosts that the options name, or on this machine, and returns the exit code.

    Args:
        target: the program.
        given: names of the options that do not have their defaults by themselves.
        options: all options of `tfdist run`.

    Raises:
        PlanError: the options ask for something that is not there.
        ClusterError: there are no free ports.
        OSError: something could not be started or written; a host cannot be reached.
    """
    from tfdist.launcher.run_plan import PlanError

    if options["hosts"] is not None or options["hostfile"] is not None:
        from tfdist.launcher.hosts.run import run_on_hosts

        return run_on_hosts(target, **options, given=given)
    from tfdist.launcher.run import run_local

    for name in _ONLY_WITH_HOSTS:
        if name in given:
            raise PlanError(f"--{name.replace('_', '-')}: expected --hosts or --hostfile, too. Leave it out without.")
    here = {name: value for name, value in options.items() if name not in ("hosts", "hostfile", *_ONLY_WITH_HOSTS)}
    return run_local(target, **here, given=given)
