"""Splitting the arguments of `tfdist run`: what is the launcher's own and what belongs to the user's program."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The user's program as it stands on the command line.

    Attributes:
        kind: "script", "module" (after -m) or "command" (after --).
        words: the program and its arguments, untouched.
    """

    kind: str
    words: tuple[str, ...]

    @property
    def typed(self) -> list[str]:
        """As it is typed, at the end of a command line of tfdist.

        Example:
            >>> Target("module", ("package.train", "--epochs", "3")).typed
            ['-m', 'package.train', '--epochs', '3']
        """
        return [*{"module": ["-m"], "command": ["--"], "script": []}[self.kind], *self.words]

    def command(self) -> tuple[str, ...]:
        """The argument vector that runs it.

        Raises:
            ValueError: there is nothing to run, or it does not exist.

        Example:
            >>> Target("module", ("package.train", "--epochs", "3")).command()[1:]
            ('-u', '-m', 'package.train', '--epochs', '3')
        """
        if not self.words:
            raise ValueError("nothing to run: expected a script. Example: tfdist run -n 2 train.py")
        program, *rest = self.words
        if self.kind == "module":
            return (sys.executable, "-u", "-m", program, *rest)
        if self.kind == "command" and shutil.which(program) is not None:
            return self.words
        if self.kind == "command" and not program.endswith(".py"):
            raise ValueError(f"{program}: no such command on the PATH. Give the path of an executable file after --.")
        if not os.path.exists(program):
            raise ValueError(
                f"{program}: no such script in {os.getcwd()}. "
                "Give the path of a Python file, -m MODULE, or -- COMMAND for a program that is not Python."
            )
        if os.path.isdir(program) and not os.path.exists(os.path.join(program, "__main__.py")):
            raise ValueError(
                f"{program}: a folder without __main__.py. "
                "Give the path of a Python file, -m MODULE, or -- COMMAND for a program that is not Python."
            )
        return (sys.executable, "-u", program, *rest)


def split(arguments: Sequence[str], options_with_value: Collection[str]) -> tuple[list[str], Target]:
    """Separates the launcher's options from the program, which begins at the first word that is no option.

    Args:
        arguments: all words after `tfdist run`.
        options_with_value: the launcher's options that take the next word, such as "--workers".

    Example:
        >>> split(["-n", "2", "train.py", "-n", "5"], {"-n"})
        (['-n', '2'], Target(kind='script', words=('train.py', '-n', '5')))
    """
    position = 0
    while position < len(arguments):
        word = arguments[position]
        if word in ("-m", "--"):
            kind = "module" if word == "-m" else "command"
            return list(arguments[:position]), Target(kind, tuple(arguments[position + 1 :]))
        if not word.startswith("-") or word == "-":
            return list(arguments[:position]), Target("script", tuple(arguments[position:]))
        position += 2 if word in options_with_value else 1
    return list(arguments), Target("script", ())
