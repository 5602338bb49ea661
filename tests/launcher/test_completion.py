"""The Tab key in real shells: what is typed, and the command line that the shell makes of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2]
# Runs tfdist for the Tab key, and else notes what it was called with.
PROGRAM = f"""#!{sys.executable}
import json, os, sys
sys.path.insert(0, {str(SOURCE)!r})
if "_TFDIST_COMPLETE" in os.environ or "--install-completion" in sys.argv:
    from tfdist.launcher.command import main
    main()
with open(os.path.expanduser("~/called"), "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
"""
PROMPT = "ready> "
SHELLS = {
    "bash": (["bash", "-i"], ".bashrc", f"PS1={PROMPT!r}\n"),
    "zsh": (["zsh", "-i"], ".zshrc", f"PS1={PROMPT!r}\n"),
    "fish": (["fish", "-i"], ".config/fish/config.fish", f"function fish_prompt; echo -n {PROMPT!r}; end\n"),
}


class Shell:
    """A shell on a terminal, in a home folder with a script.

    Args:
        name: one of `SHELLS`.
        home: where it lives.
    """

    def __init__(self, name: str, home: Path) -> None:
        self.name, self.home, self.shown = name, home, b""
        (home / "bin").mkdir()
        (home / "my_script.py").touch()
        program = home / "bin" / "tfdist"
        program.write_text(PROGRAM)
        program.chmod(0o755)
        startup = home / SHELLS[name][1]
        startup.parent.mkdir(parents=True, exist_ok=True)
        startup.write_text(SHELLS[name][2])
        kept = {key: os.environ[key] for key in ("LANG", "LC_ALL") if key in os.environ}
        path = f"{program.parent}:{os.environ['PATH']}"
        self.env = {**kept, "HOME": str(home), "PATH": path, "TERM": "xterm", "SHELL": shutil.which(name)}

    def install(self, *words: str) -> str:
        command = [self.home / "bin" / "tfdist", "--install-completion", *words]
        return subprocess.run(
            command, env=self.env, cwd=self.home, capture_output=True, text=True, timeout=60, check=True
        ).stdout

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        self.terminal, other = pty.openpty()
        self.process = subprocess.Popen(
            SHELLS[self.name][0],
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=self.home,
            env=self.env,
            preexec_fn=_own_terminal,
        )
        os.close(other)
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self._wait(lambda: PROMPT.encode() in self.shown, "shows its prompt")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)
            os.close(self.terminal)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self.terminal, 4096):
                self.shown += chunk

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < end, f"{self.name} never {what}. It showed: {self.shown!r}"
            time.sleep(0.02)

    def typed(self, keys: str) -> list[str]:
        """Types a line, and returns the arguments that tfdist was then called with."""
        called = self.home / "called"
        before = called.read_text().count("\n") if called.exists() else 0
        os.write(self.terminal, keys.encode() + b"\r")
        self._wait(lambda: called.exists() and called.read_text().count("\n") > before, f"runs {keys!r}")
        return json.loads(called.read_text().splitlines()[before])


def _own_terminal() -> None:
    """Makes the terminal on standard input the one that keys of this process come from."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.fixture(params=SHELLS)
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return Shell(request.param, tmp_path)


def test_the_tab_key(shell: Shell) -> None:
    shell.install(shell.name)
    with shell.started():
        assert shell.typed("tfdist subm\t") == ["submit"]
        assert shell.typed("tfdist run --outp\tch\tmy_scr\t") == ["run", "--output", "chief", "my_script.py"]
        # Its own options are the script's.
        assert shell.typed("tfdist run my_script.py --outp\t") == ["run", "my_script.py", "--outp"]
        assert shell.typed("tfdist horovod bu\t--fo\t") == ["horovod", "build", "--force"]


def test_without_installation_the_tab_key_knows_nothing(shell: Shell) -> None:
    with shell.started():
        assert shell.typed("tfdist subm\t") == ["subm"]


def test_installed_twice_is_installed_once(shell: Shell) -> None:
    first = shell.install(shell.name)
    files = {path: path.read_bytes() for path in shell.home.rglob("*") if path.is_file()}
    assert "written" in first
    second = shell.install(shell.name)
    assert {path: path.read_bytes() for path in shell.home.rglob("*") if path.is_file()} == files
    assert "up to date" in second
    assert "written" not in second and "added" not in second
