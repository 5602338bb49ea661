"""A real Slurm: munge, its controller and three nodes, on this machine or on the three hosts of `hosts.py`."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.launcher.conftest import Launch, wait_until
from tests.system.hosts import NAMES, Host, Hosts
from tfdist.cluster.ports import reserve

# Debian's: the commands of administrators are not in every user's path.
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=2
"""
_NODE = "NodeName={name} {place} Port={port} CPUs=4 RealMemory=4000 State=UNKNOWN\n"
_PARTITION = "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"
_UP_SECONDS = 120.0
_SHOWN = 2000


class Slurm:
    """The cluster, as long as the `with` block lasts; its nodes are n9, n10 and n11.

    Args:
        hosts: one for each node; `None` runs all of them on this machine.

    Attributes:
        env: what srun, salloc and sbatch need in their environment.

    Example:
        >>> with Slurm() as slurm:  # doctest: +SKIP
        ...     subprocess.run(slurm.command("srun", "-n3", "hostname"), env=os.environ | slurm.env)
    """

    def __init__(self, hosts: Hosts | None = None):
        self._hosts = hosts
        # Short: the path of a socket has at most 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="tfdist-slurm-"))
        self.env = {"SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": _PATH}
        self._daemons: list[Launch] = []

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            print(self.logs())
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self.ask("scancel", "--full", "--user=root")
        for daemon in reversed(self._daemons):
            daemon.clean_up()
        shutil.rmtree(self._folder, ignore_errors=True)

    def command(self, *words: str) -> list[str]:
        """The command that runs another one where users log in."""
        return list(words) if self._hosts is None else self._hosts.switch.command(*words)

    def ask(self, *words: str) -> str:
        """What a short command of Slurm prints.

        Raises:
            subprocess.SubprocessError: if it fails.
        """
        command, env = self.command(*words), {**os.environ, **self.env}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True).stdout

    def logs(self) -> str:
        """The ends of what the daemons have written."""
        files = sorted(self._folder.glob("*.out"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-_SHOWN:]}" for path in files)

    def _start(self) -> None:
        (self._folder / "state").mkdir()
        self._folder.chmod(0o755)
        with reserve(1 + len(NAMES)) as reserved:
            port, *ports = reserved.ports
            self._configure(port, ports)
        self._run("munged", *self._munge(), "--foreground", "--force", on=None)
        wait_until((self._folder / "munge.socket").is_socket, _UP_SECONDS, "munged")
        self._run("slurmctld", "-D", on=None if self._hosts is None else self._hosts.switch)
        for name in NAMES:
            (self._folder / f"spool-{name}").mkdir()
            self._run("slurmd", "-D", "-N", name, on=None if self._hosts is None else self._hosts[name])
        wait_until(self._is_up, _UP_SECONDS, "three idle nodes")

    def _configure(self, port: int, ports: list[int]) -> None:
        controller, address = socket.gethostname().partition(".")[0], "127.0.0.1"
        if self._hosts is not None:
            controller, address = self._hosts.switch.name, self._hosts.switch.address
        text = _CONFIGURATION.format(controller=controller, address=address, port=port, folder=self._folder)
        for name, own_port in zip(NAMES, ports, strict=True):
            place = f"NodeHostname={controller} NodeAddr={address}"
            if self._hosts is not None:
                place = f"NodeAddr={self._hosts[name].address}"
            text += _NODE.format(name=name, place=place, port=own_port)
        Path(self.env["SLURM_CONF"]).write_text(text + _PARTITION)

    def _munge(self) -> list[str]:
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        names = {"key-file": key.name, "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        return [f"--{option}={self._folder / name}" for option, name in (names | {"socket": "munge.socket"}).items()]

    def _run(self, name: str, *options: str, on: Host | None) -> None:
        # The kernel ends it when these tests are killed.
        command = ["setpriv", "--pdeathsig=TERM", name, *options]
        with (self._folder / f"{name}-{len(self._daemons)}.out").open("wb") as out:
            command = command if on is None else on.command(*command)
            self._daemons.append(Launch(self._folder, command, env=self.env, stdout=out, stderr=out))

    def _is_up(self) -> bool:
        with contextlib.suppress(subprocess.SubprocessError):
            return self.ask("sinfo", "--noheader", "--states=idle", "--format=%D").split() == [str(len(NAMES))]
        return False
