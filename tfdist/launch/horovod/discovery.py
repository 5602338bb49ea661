"""The program that names the hosts of an elastic job: run, and read."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Mapping

from tfdist.launch.plan import PlanError

_LINE = re.compile(r"(?P<host>[^\s:]+):(?P<slots>\d+)")
_SECONDS = 60.0
_SHOWN = 200


class DiscoveryError(PlanError):
    """The program does not say which hosts there are; the text names what it did and what is expected."""


def discover_hosts(program: str) -> dict[str, int]:
    """Runs the program: how many processes each host may have now.

    Raises:
        DiscoveryError: if it is not there, fails, takes too long, or prints something else.

    Example:
        >>> discover_hosts("./hosts.sh")
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
