"""Where the shells find click's script for the Tab key, and a line that makes them read it.

bash    DATA/tfdist/completion.bash, and a line in ~/.bashrc
zsh     DATA/tfdist/completion.zsh, and a line in ~/.zshrc (that of ZDOTDIR)
fish    CONFIG/fish/completions/tfdist.fish, which fish reads by itself

DATA is XDG_DATA_HOME or ~/.local/share, CONFIG is XDG_CONFIG_HOME or ~/.config. The scripts call tfdist for each Tab.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import click
import psutil
from click.shell_completion import get_completion_class

from tfdist.atomic_files import write_atomically
from tfdist.launcher.completion import SHELLS, THIS_SHELL

_PROGRAM = "tfdist"
# At the end of the line in the shell's file: by this it is found again.
_MARK = "# completion of tfdist"
# Without it, zsh has no `compdef`, which click's script calls.
_ZSH_HEAD = "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }\n"


class Place(NamedTuple):
    """Where the completion of a shell goes.

    Attributes:
        script: the file that this program writes.
        startup: the user's file that has to name it; `None` if the shell finds it anyway.
    """

    script: Path
    startup: Path | None


def place_of(shell: str, env: Mapping[str, str], home: Path) -> Place:
    """Where the completion of a shell goes.

    Args:
        shell: one of `SHELLS`.
        env: the environment variables.
        home: the user's home folder.

    Example:
        >>> place_of("fish", {}, Path("/home/me")).script.as_posix()
        '/home/me/.config/fish/completions/tfdist.fish'
    """
    if shell == "fish":
        config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
        return Place(config / "fish" / "completions" / "tfdist.fish", None)
    data = Path(env.get("XDG_DATA_HOME") or home / ".local" / "share")
    startup = home / ".bashrc" if shell == "bash" else Path(env.get("ZDOTDIR") or home) / ".zshrc"
    return Place(data / "tfdist" / f"completion.{shell}", startup)


def script_of(shell: str, command: click.Command) -> str:
    """The script that lets a shell ask `command` what may follow on a command line."""
    script = get_completion_class(shell)(command, {}, _PROGRAM, f"_{_PROGRAM.upper()}_COMPLETE").source()
    return _ZSH_HEAD + script if shell == "zsh" else script


def install(shell: str, command: click.Command, env: Mapping[str, str], home: Path) -> list[str]:
    """Installs the completion of a shell; returns what was done, in lines for the user.

    Raises:
        OSError: a file cannot be written; the shell's own file is as it was.
    """
    script, startup = place_of(shell, env, home)
    done = [_write(script, script_of(shell, command))]
    if startup is not None:
        quoted = shlex.quote(str(script))
        done.append(_name(startup, f"[ ! -f {quoted} ] || . {quoted}  {_MARK}"))
    return [*done, f"It works in every {shell} that starts from now on."]


def _write(path: Path, content: str) -> str:
    if path.exists() and path.read_text(encoding="utf-8") == content:
        return f"{path}: is up to date"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
    return f"{path}: written"


def _name(path: Path, line: str) -> str:
    """Puts a line into a file of the user's, in the place of an earlier one of ours."""
    text = path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""
    lines = text.splitlines()
    if line in lines:
        return f"{path}: names it already"
    ours = [number for number, other in enumerate(lines) if other.endswith(_MARK)]
    if ours:
        lines[ours[0]] = line
        # The file may be a link into a folder of such files: the link has to stay.
        target = Path(os.path.realpath(path))
        content = "\n".join([*lines, ""]).encode(errors="surrogateescape")
        write_atomically(target, content, target.stat().st_mode & 0o777)
        return f"{path}: the line now is: {line}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.write(("" if not text or text.endswith("\n") else "\n") + line + "\n")
    return f"{path}: added the line: {line}"


def shell_of_user(env: Mapping[str, str], processes: Iterable[str]) -> str | None:
    """The shell that a command was typed in, or else the user's login shell; `None` if it is none of `SHELLS`.

    Args:
        env: the environment variables.
        processes: names of the processes above this one, the nearest first.

    Example:
        >>> shell_of_user({"SHELL": "/bin/bash"}, ["make", "fish"]), shell_of_user({"SHELL": "/bin/ksh"}, [])
        ('fish', None)
    """
    names = (name.lstrip("-") for name in (*processes, os.path.basename(env.get("SHELL", ""))))
    return next((name for name in names if name in SHELLS), None)


def processes_above() -> list[str]:
    """Names of the processes above this one, the nearest first."""
    return [process.name() for process in psutil.Process().parents()]


def wanted_shell(named: str) -> str:
    """The shell with this name; for `THIS_SHELL`, the user's.

    Raises:
        click.UsageError: the user's shell is none of `SHELLS`.
    """
    found = named if named != THIS_SHELL else shell_of_user(os.environ, processes_above())
    if found is None:
        raise click.UsageError(
            f"which shell? Expected one of {', '.join(SHELLS)}: for example tfdist --install-completion bash."
        )
    return found
