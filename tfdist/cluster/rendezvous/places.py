"""Where the processes of a job meet: ports that all of them can compute, and what they know each other by."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path

from tfdist.cluster import address, sockets
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.ports import default_range
from tfdist.cluster.preflight import SKIP_ADDRESS_CHECK, is_on
from tfdist.cluster.rendezvous.addresses import host_name, of_this_host

# Of these, the first that is free is taken: others may be in use, also by another job of the same user.
_CANDIDATES = 8
_USUAL = 20000, 32768
_PORTS = "TFDIST_PORTS"
_TOKEN = "TFDIST_TOKEN"


def port_range(env: Mapping[str, str]) -> tuple[int, int]:
    """The lowest port that may be used, and the end of the range, which is not in it.

    Raises:
        ClusterError: if TFDIST_PORTS is no range.

    Example:
        >>> port_range({"TFDIST_PORTS": "21000-21099"})
        (21000, 21100)
    """
    text = env.get(_PORTS, "").strip()
    if not text:
        return default_range()
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]) < 65536:
        raise ClusterError(f"Received: {_PORTS}={text!r}. Expected: two ports, such as 21000-21099")
    return int(match[1]), int(match[2]) + 1


def meeting_ports(membership: Membership, env: Mapping[str, str]) -> list[int]:
    """The ports at which rank 0 of a job may be found, in the order in which they are tried: the same on all hosts.

    Example:
        >>> len(meeting_ports(Membership(0, 2, "test", "slurm-17.0"), {}))
        8
        >>> meeting_ports(Membership(0, 2, "test", "slurm-17.0"), {"TFDIST_PORTS": "21000-21000"})
        [21000]
    """
    # What is usual: where outgoing connections begin may differ from host to host.
    low, high = port_range(env) if env.get(_PORTS) else _USUAL
    ports: dict[int, None] = {}
    for attempt in range(16 * _CANDIDATES):
        digest = hashlib.sha256(f"{name_of(membership, env)}/{attempt}".encode()).digest()
        ports[low + int.from_bytes(digest[:8], "big") % (high - low)] = None
    return list(ports)[:_CANDIDATES]


def meeting_place(membership: Membership, env: Mapping[str, str]) -> tuple[str | None, int | None]:
    """Host and port at which rank 0 is to be met; `None` for what is not given, or better learnt from its channel.

    Raises:
        ClusterError: if TFDIST_MEETING is no address.

    Example:
        >>> meeting_place(Membership(0, 2, "test", "job"), {"TFDIST_MEETING": "node-1:2222"})
        ('node-1', 2222)
        >>> meeting_place(Membership(0, 2, "test", "job", local_size=2), {})
        ('localhost', None)
    """
    given = env.get("TFDIST_MEETING", "").strip()
    if not given and membership.channel is not None:
        return None, None  # what goes through it is this job's only, whatever else runs here
    if not given:
        return ("localhost" if membership.on_one_host else membership.host), None
    if given.count(":") == 1 or given.startswith("["):
        try:
            return address.split(given)
        except ValueError as error:
            raise ClusterError(f"TFDIST_MEETING: {error}") from None
    return given, None


def check_own(host: str, env: Mapping[str, str]) -> None:
    """Makes sure that rank 0 is where the others look for it.

    With `TFDIST_SKIP_ADDRESS_CHECK=1`, and in Kubernetes, it may be somewhere else: what is there may pass it on.

    Args:
        host: of TFDIST_MEETING.
        env: the environment variables.

    Raises:
        ClusterError: if that is another host, or none.

    Example:
        >>> check_own("localhost", {})
    """
    if is_on(env, SKIP_ADDRESS_CHECK) or "KUBERNETES_SERVICE_HOST" in env:
        return
    expected = "Expected: the name or an address of the host of rank 0, on all processes"
    try:
        sockets.bind_host(host, 0, reuse=True).close()
    except (socket.gaierror, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ClusterError(f"Received: TFDIST_MEETING with the host {host!r}: {why}. {expected}") from None
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ClusterError(
                f"Received: TFDIST_MEETING with the host {host!r}, which is none of the addresses of "
                f"{host_name(env)}, where rank 0 is ({', '.join(of_this_host())}). {expected}; if connections to it "
                f"are passed on to this one, set {SKIP_ADDRESS_CHECK}=1"
            ) from None


def secret_of(membership: Membership, env: Mapping[str, str], home: Path | None = None) -> bytes:
    """What the processes of a job know, and no others: TFDIST_TOKEN, or else a key in the home folder, if it is shared.

    Where neither is there, it is the name of the job: a process of another job is noticed, an attacker who can reach
    the ports is not.

    Args:
        membership: this process.
        env: its environment variables.
        home: the home folder.

    Raises:
        ClusterError: if no key can be kept there.

    Example:
        >>> one, other = Membership(0, 2, "test", "job 1"), Membership(0, 2, "test", "job 2")
        >>> env = {"TFDIST_TOKEN": "secret"}
        >>> secret_of(one, env) == secret_of(one, env), secret_of(one, env) == secret_of(other, env)
        (True, False)
    """
    token = env.get(_TOKEN, "").encode()
    if not token and membership.shared_home:
        try:
            token = _key_in(home or Path.home())
        except (OSError, RuntimeError) as error:
            raise ClusterError(
                f"Received: a home folder in which no key can be kept ({error}). Expected: TFDIST_TOKEN, the same "
                "secret text on all processes of the job"
            ) from None
    return hmac.digest(token, name_of(membership, env).encode(), "sha256")


def name_of(membership: Membership, env: Mapping[str, str]) -> str:
    """What tells the job from others.

    Example:
        >>> name_of(Membership(0, 2, "TFDIST_RANK", ""), {"TFDIST_JOB": "faces"})
        'faces'
    """
    return f"{membership.job} {env.get('TFDIST_JOB', '')}".strip()


def _key_in(home: Path) -> bytes:
    """The key that is kept in a folder; the first process makes it."""
    path = home / ".config" / "tfdist" / "key"
    if not path.exists():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = path.with_name(f"key.{secrets.token_hex(8)}")
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        try:
            # Of several processes that come to this at the same time, on any host, only one succeeds.
            os.link(own, path)
        except FileExistsError:
            pass
        finally:
            own.unlink()
    return path.read_bytes()
