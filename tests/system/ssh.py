"""A real sshd on each of the hosts of `hosts.py`, and a configuration by which ssh needs no password."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.launcher.conftest import Launch, wait_until
from tests.system.hosts import Host, Hosts

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
# sshd does not start without it.
_SEPARATION = Path("/run/sshd")
_UP_SECONDS = 120.0
_SSHD = """\
ListenAddress {address}
HostKey {folder}/key-{name}
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
AuthorizedKeysFile {folder}/user.pub
Banner {folder}/banner
"""
# What a user's shell prints on some hosts.
_TALKATIVE = 'ForceCommand echo "Welcome to {name}!"; exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
_SSH = """\
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
IdentitiesOnly yes
"""
# The alias resolves nowhere but here.
_ALIAS = """
Host {alias}
    HostName {address}
    HostKeyAlias {name}
    IdentityFile {folder}/user
"""


def alias(host: Host) -> str:
    """What users call a host, other than its name."""
    return f"my-{host.name}"


class Sshds:
    """They run as long as the `with` block lasts.

    Args:
        folder: an empty one.
        hosts: where they run.

    Attributes:
        command: what is given to --ssh.
    """

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        self._folder, self._hosts = folder, hosts
        self._daemons: dict[str, Launch] = {}
        self.command = f"ssh -F {folder}/config"

    def __enter__(self) -> Sshds:
        self._folder.mkdir()
        _SEPARATION.mkdir(exist_ok=True)
        (self._folder / "banner").write_text("Unauthorized use is prohibited.\n")
        for name in ("user", *(f"key-{host.name}" for host in self._hosts)):
            words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", str(self._folder / name)]
            subprocess.run(words, check=True, timeout=_UP_SECONDS)
        keys = [(host, (self._folder / f"key-{host.name}.pub").read_text().split()[:2]) for host in self._hosts]
        (self._folder / "known_hosts").write_text("".join(f"{host.name} {' '.join(key)}\n" for host, key in keys))
        places = [{"alias": alias(host), "address": host.address, "name": host.name} for host in self._hosts]
        aliases = (_ALIAS.format(folder=self._folder, **place) for place in places)
        (self._folder / "config").write_text(_SSH.format(folder=self._folder) + "".join(aliases))
        try:
            for number, host in enumerate(self._hosts):
                self._start(host, is_talkative=number == 2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for daemon in self._daemons.values():
            daemon.clean_up()

    def left(self, host: Host) -> list[int]:
        """What runs on a host besides its sshd."""
        sshd = self._daemons[host.name].popen.pid
        return [process for process in host.processes() if process != sshd]

    def _start(self, host: Host, is_talkative: bool) -> None:
        place = {"folder": self._folder, "name": host.name, "address": host.address}
        config, log = self._folder / f"sshd-{host.name}", self._folder / f"log-{host.name}"
        config.write_text((_SSHD + _TALKATIVE * is_talkative).format(**place))
        words = host.command(str(SSHD), "-D", "-e", "-f", str(config))
        with log.open("wb") as stream:
            daemon = Launch(self._folder, ["setpriv", "--pdeathsig=TERM", *words], stdout=stream, stderr=stream)
        self._daemons[host.name] = daemon
        wait_until(
            lambda: "Server listening" in log.read_text() or daemon.popen.poll() is not None, _UP_SECONDS, "an sshd"
        )
        assert daemon.popen.poll() is None, log.read_text()
