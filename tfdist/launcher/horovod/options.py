"""What the user asks of an elastic job, and the program that names its hosts: checked before anything starts."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tfdist.cluster.variables import HOROVOD, TRANSPORT_VARIABLE
from tfdist.launcher.machine import Machine
from tfdist.launcher.run_plan import OF_CLUSTER, PlanError, runtime_defaults

_LINE = re.compile(r"(?P<host>[^\s:-][^\s:]*):(?P<slots>\d+)")
_SECONDS = 60.0
_SHOWN = 200
_OF_HOSTS = "the program says how many processes a host has, which share its cores and take its GPUs in turn"
_NOT_WATCHED = "processes of elastic jobs are not watched for standing still; Horovod notices those that end"
# Why an option does nothing in an elastic job.
_REFUSED = {
    "chief": "Horovod gives the ranks, and rank 0 to another process when the first one is lost",
    "evaluator": "Horovod runs processes that train only",
    "cpus_per_worker": _OF_HOSTS,
    "gpus_per_worker": _OF_HOSTS,
    "host": "the program names the hosts",
    "hang_timeout": _NOT_WATCHED,
    "start_timeout": _NOT_WATCHED,
    "warm": "processes that are forked could be on this machine only",
}


@dataclass(frozen=True)
class ElasticOptions:
    """What the user asked for.

    Attributes:
        command: what each process runs.
        fewest: how many processes go on at least.
        most: how many there are at most.
        program: that prints a line `host:slots` for each host that can be used now.
        interface: the network interface that all hosts share; `None` lets Horovod look for it.
        show_all: whether the output of all processes is shown.
        grace: seconds between a signal that is passed on and SIGKILL.
        max_restarts: how often to start anew when too few processes are left.
        chosen: names of the variables that the user has set by --env; they go to other hosts, too.
    """

    command: tuple[str, ...]
    fewest: int
    most: int
    program: str
    interface: str | None
    show_all: bool
    grace: float
    max_restarts: int
    chosen: frozenset[str] = frozenset()


def check_options(given: Collection[str], has_range: bool) -> None:
    """Checks the other options of an elastic job.

    Args:
        given: names of the options that were given.
        has_range: whether -n was.

    Raises:
        PlanError: for an option that would do nothing.
    """
    for name in (name for name in _REFUSED if name in given):
        option = f"--{name.replace('_', '-')}" if name != "warm" else "--warm/--no-warm"
        raise PlanError(f"{option} and --host-discovery: expected only one of them: {_REFUSED[name]}. Leave it out.")
    if not has_range:
        raise PlanError(
            "--host-discovery: expected -n MIN:MAX, too: with how many processes to go on at least, and how many there "
            "are at most."
        )


def check_hosts(options: ElasticOptions) -> list[str]:
    """Runs the program once, and returns what the user should know beforehand.

    Raises:
        PlanError: if it does not name hosts, or Horovod could not connect them.
    """
    hosts = discover_hosts(options.program)
    check_network(hosts, options.interface, options.program)
    slots = sum(hosts.values())
    if slots < options.fewest:
        return [f"{options.program} names hosts for {slots} processes: waiting until there are {options.fewest}"]
    if len(hosts) == 1:
        return [
            f"all processes are on one host, {next(iter(hosts))}: Horovod does not use a host again on which a process "
            "has failed, so the loss of one process ends all. Name other hosts, or other names of this one, too"
        ]
    return []


def elastic_announcement(options: ElasticOptions, log_dir: str) -> str:
    """The line at the start.

    Example:
        >>> elastic_announcement(ElasticOptions(("python", "t.py"), 1, 4, "hosts.sh", "lo", False, 10.0, 3), "logs")
        'Horovod keeps 1 to 4 processes running, on the hosts that hosts.sh names; complete logs in logs/'
    """
    counts = str(options.most) if options.fewest == options.most else f"{options.fewest} to {options.most}"
    return (
        f"Horovod keeps {counts} processes running, on the hosts that {options.program} names; complete logs in "
        f"{log_dir}/"
    )


def elastic_environment(
    environ: Mapping[str, str], own: Mapping[str, str], machine: Machine, most: int
) -> dict[str, str]:
    """The environment of the processes, but for what Horovod adds.

    Args:
        environ: the launcher's own.
        own: what the user has set by --env.
        machine: this machine.
        most: how many processes there are at most.
    """
    cores = max(1, len(machine.cores) // most)
    inherited = {name: value for name, value in environ.items() if name not in OF_CLUSTER}
    defaults = {**runtime_defaults(cores, len(machine.cores), ps_cluster=False), "PYTHONUNBUFFERED": "1"}
    return {**defaults, **inherited, **own, TRANSPORT_VARIABLE: HOROVOD}


class DiscoveryError(PlanError):
    """The program does not say which hosts there are; the text names what it did and what is expected."""


def discover_hosts(program: str) -> dict[str, int]:
    """Runs the program: how many processes each host may have now.

    Raises:
        DiscoveryError: if it is not there, fails, takes too long, or prints something else.

    Example:
        >>> discover_hosts("./hosts.sh")  # doctest: +SKIP
        {'node-1': 2, 'node-2': 2}
    """
    if not os.path.isfile(program) or not os.access(program, os.X_OK):
        raise DiscoveryError(
            f"--host-discovery {program}: expected a program that can be run and prints one line host:slots for "
            "each host. Give its path, and make it executable (chmod +x)."
        )
    try:
        # By a shell, as Horovod does: a script needs no line with its interpreter.
        result = subprocess.run(
            shlex.quote(os.path.abspath(program)),
            shell=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise DiscoveryError(
            f"--host-discovery {program}: it has not ended after {_SECONDS:g} s. Expected: it prints the hosts that "
            "can be used now, and ends; it is run every second."
        ) from None
    if result.returncode != 0:
        said = (result.stderr.strip() or result.stdout.strip() or "(nothing)")[-_SHOWN:]
        raise DiscoveryError(
            f"--host-discovery {program}: it has failed with exit code {result.returncode}, and printed: {said}. "
            f"Expected: exit code 0, and one line host:slots for each host; try it: {shlex.quote(program)}"
        )
    return hosts_of(result.stdout, program)


def hosts_of(text: str, program: str) -> dict[str, int]:
    """What the program has printed; a host without slots is not used now.

    Raises:
        DiscoveryError: for a line that is none of host:slots, or a host that is named twice.

    Example:
        >>> hosts_of("a:2\\nb:1\\n", "hosts.sh")
        {'a': 2, 'b': 1}
    """
    hosts: dict[str, int] = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _LINE.fullmatch(line)
        if match is None:
            raise DiscoveryError(
                f"--host-discovery {program}: it has printed the line {line[:_SHOWN]!r}. Expected: host:slots, the "
                "name of a host and how many processes it may have, such as node-1:4, and nothing else on its standard "
                "output."
            )
        if match["host"] in hosts:
            raise DiscoveryError(
                f"--host-discovery {program}: it has named {match['host']} twice. Expected: one line for each host, "
                "with the number of all its processes."
            )
        hosts[match["host"]] = int(match["slots"])
    return {host: slots for host, slots in hosts.items() if slots}


def check_network(hosts: Mapping[str, int], interface: str | None, program: str) -> None:
    """Checks that Horovod can tell how the hosts reach each other.

    Args:
        hosts: those that there are now.
        interface: the network interface that the user names.
        program: that has named the hosts.

    Raises:
        PlanError: if there is no such interface; or if none is named, and there are no two hosts, between which Horovod
            could find one: it would wait for a second one in silence.

    Example:
        >>> check_network({"localhost": 2}, "lo", "hosts.sh")
    """
    if interface is None:
        if len(hosts) < 2:
            raise PlanError(
                f"--host-discovery {program}: it names {_count(hosts)}. Without two hosts, Horovod cannot find the "
                "network interface that they share, and would wait for another one. Add --interface lo if all "
                "processes stay on this machine, otherwise --interface NAME, which all hosts have."
            )
        return
    import psutil

    found = psutil.net_if_addrs()
    if not any(address.family.name == "AF_INET" for address in found.get(interface, ())):
        usable = [name for name, all_ in found.items() if any(one.family.name == "AF_INET" for one in all_)]
        raise PlanError(
            f"--interface {interface}: this machine has no such network interface with an IPv4 address. Expected: one "
            f"of {', '.join(sorted(usable))}, that all hosts share."
        )


def _count(hosts: Mapping[str, int]) -> str:
    return f"one host only ({', '.join(hosts)})" if hosts else "no host"
