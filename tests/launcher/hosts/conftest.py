"""Several hosts that are all this machine, behind a program in the place of ssh."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.launcher.conftest import Launch, wait_until, write_script
from tests.processes import MARK
from tfdist.launcher import guardian as guardian_program

# Writes down its command line, and what the agent says. Its user's shell over there greets; nothing of this side's
# environment gets there.
# What copies its output ends with it, whenever it is killed: a reader of a named pipe could wait for a writer for ever.
_SSH = """\
#!/bin/bash
tr '\\0' '\\n' < /proc/$$/cmdline >> {folder}/command-lines
while :; do case "$1" in -o|-F) shift 2 ;; -*) shift ;; *) break ;; esac; done
host=$1
shift
if [ -e {folder}/down-$host ]; then
    echo "ssh: connect to host $host port 22: No route to host" >&2
    exit 255
fi
echo "$$" > {folder}/agent-$host
[ ! -e {folder}/profile-$host ] || . {folder}/profile-$host
exec env -i HOME=/ PATH=/usr/bin:/bin FAKE_HOST="$host" {mark}="${mark}" \\
    SSH_CONNECTION="192.0.2.1 40000 127.0.0.1 22" {shell} -c "$*" > >(exec tee -a {folder}/said-$host)
"""


class FakeSsh:
    """A program in the place of ssh.

    Attributes:
        folder: where it looks, and writes.
        command: what is given to --ssh.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._path = folder / "ssh"
        self.command = f"{shlex.quote(str(self._path))} -F 'my config'"
        self.use_shell("/bin/sh")

    def use_shell(self, shell: str) -> None:
        """What the user's shell is over there."""
        text = _SSH.format(folder=shlex.quote(str(self.folder)), mark=MARK, shell=shell)
        self._path.write_text(text)
        self._path.chmod(0o755)

    def set_down(self, host: str, is_down: bool = True) -> None:
        """Whether a host cannot be reached from now on."""
        path = self.folder / f"down-{host}"
        path.touch() if is_down else path.unlink()

    def set_profile(self, host: str, text: str) -> None:
        """What the user's shell runs first over there."""
        (self.folder / f"profile-{host}").write_text(text)

    def wait_for_training(self, host: str, deadline: float) -> None:
        """Waits until the launcher knows, or is about to read, that a process of a host has done a step.

        A file that the process makes would say so too early: who loses the host then ends the run.
        """
        said = self.folder / f"said-{host}"
        is_known = re.compile(r'"kind": "progress".*"step": [1-9]').search
        wait_until(lambda: said.exists() and is_known(said.read_text()) is not None, deadline, f"training on {host}")

    def agent(self, host: str) -> int:
        """The process id of the last agent of a host."""
        return int((self.folder / f"agent-{host}").read_text())

    def lose(self, host: str) -> None:
        """Kills the last agent of a host as if the machine had failed.

        Its guardian goes first: it would kill what the other hosts run, too, since all of them are this machine.
        """
        agent = psutil.Process(self.agent(host))
        for guardian in (one for one in agent.children() if guardian_program.__file__ in one.cmdline()):
            guardian.kill()
        agent.kill()

    @property
    def command_lines(self) -> str:
        return (self.folder / "command-lines").read_text()


@pytest.fixture
def ssh(tmp_path: Path) -> FakeSsh:
    return FakeSsh(tmp_path / "fake ssh")


@pytest.fixture
def launch_on(launches: list[Launch], tmp_path: Path, ssh: FakeSsh) -> Callable[..., Launch]:
    """`launch_on("a:2,b", script, *launcher_options)` starts `tfdist run --hosts`."""

    def start(hosts: str, script: str, *options: str, arguments: Sequence[str] = (), **more) -> Launch:
        folder = more.pop("folder", tmp_path)
        write_script(folder, script)
        names = ["--hosts", hosts] if hosts else []
        command = [sys.executable, "-m", "tfdist", "run", *names, "--ssh", ssh.command, *options]
        env = {"PWD": str(folder), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **more.pop("env", {})}
        launches.append(Launch(folder, [*command, *(arguments or ["script.py"])], env=env, **more))
        return launches[-1]

    return start
