"""Command lines that end with a script: tfdist's own options, then the script with its arguments."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click
from click.shell_completion import CompletionItem

from tfdist.cluster.variables import RUN_ID, TRANSPORT_VARIABLE, TRANSPORTS

AUTO = "auto"
# Where a command finds its `Target`, in the meta of click's context.
TARGET = "tfdist.launcher.target"
STAGES, REPLICAS = STAGE_VARIABLES = ("TFDIST_STAGES", "TFDIST_REPLICAS")

# Paths that need not be there yet; the Tab key completes them.
FOLDER = click.Path(file_okay=False)
FILE = click.Path(dir_okay=False)


class Refusal(click.ClickException):
    """Ends a command with exit code 1, and with a line that says why."""

    def show(self, file: Any = None) -> None:
        """Prints the line."""
        click.echo(f"tfdist: {self.message}", file=file, err=True)


@contextlib.contextmanager
def refused(*kinds: type[Exception]) -> Iterator[None]:
    """Shows errors of these kinds in a line, without a traceback: what a disk does not allow, say."""
    try:
        yield
    except BrokenPipeError:
        raise  # nobody reads any more: click ends the command
    except kinds as error:
        raise Refusal(str(error)) from None


class PlanError(click.UsageError, ValueError):
    """A run that cannot be started as it was asked for; the text names the option, what was found and the remedy."""


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
            PlanError: there is nothing to run, or it does not exist.

        Example:
            >>> Target("module", ("package.train", "--epochs", "3")).command()[1:]
            ('-u', '-m', 'package.train', '--epochs', '3')
        """
        if not self.words:
            raise PlanError("nothing to run: expected a script. Example: tfdist run -n 2 train.py")
        program, *rest = self.words
        if self.kind == "module":
            return (sys.executable, "-u", "-m", program, *rest)
        if self.kind == "command" and shutil.which(program) is not None:
            return self.words
        if self.kind == "command" and not program.endswith(".py"):
            raise PlanError(f"{program}: no such command on the PATH. Give the path of an executable file after --.")
        if not os.path.exists(program):
            raise PlanError(
                f"{program}: no such script in {os.getcwd()}. "
                "Give the path of a Python file, -m MODULE, or -- COMMAND for a program that is not Python."
            )
        if os.path.isdir(program) and not os.path.exists(os.path.join(program, "__main__.py")):
            raise PlanError(
                f"{program}: a folder without __main__.py. "
                "Give the path of a Python file, -m MODULE, or -- COMMAND for a program that is not Python."
            )
        return (sys.executable, "-u", program, *rest)


@dataclass(frozen=True)
class Stages:
    """How many parts the model is cut into, and how often each part exists. Each is a process.

    The first process drives all the others, which serve it: only the first one trains for itself, and what it returns
    is the result.

    Attributes:
        stages: parts of the model.
        replicas: copies of the model.

    Example:
        >>> Stages(3, 2).workers, str(Stages(3, 2))
        (6, '2 replicas of 3 stages')
    """

    stages: int
    replicas: int = 1

    @property
    def workers(self) -> int:
        """The number of processes."""
        return self.stages * self.replicas

    def environment(self) -> Mapping[str, str]:
        """The variables that it adds to the environment of each process."""
        return {STAGES: str(self.stages), REPLICAS: str(self.replicas)}

    def __str__(self) -> str:
        stages = f"{self.stages} stage{'' if self.stages == 1 else 's'}"
        return stages if self.replicas == 1 else f"{self.replicas} replicas of {stages}"


def stages_of(
    workers: tuple[int, int] | None, stages: int | None, replicas: int | None, ps: int, chief: bool
) -> Stages | None:
    """What --stages and --replicas ask for.

    Raises:
        PlanError: they contradict the other options.

    Example:
        >>> stages_of(None, 2, None, ps=0, chief=False)
        Stages(stages=2, replicas=1)
    """
    if stages is None:
        if replicas is None:
            return None
        raise PlanError(
            f"--replicas {replicas}: expected --stages K as well. Use -n {replicas} for copies of a whole model."
        )
    parts = Stages(stages, replicas or 1)
    if workers is not None:
        asked = str(workers[0]) if workers[0] == workers[1] else f"{workers[0]}:{workers[1]}"
        raise PlanError(
            f"-n {asked} and --stages {stages}: expected only one of them. "
            f"--stages starts a process for each stage and replica, here {parts.workers}: leave -n out."
        )
    for option, given in ((f"--ps {ps}", ps > 0), ("--chief", chief)):
        if given:
            raise PlanError(
                f"{option} and --stages {stages}: expected only one of them. "
                f"The first of the processes drives the others: leave {option} out."
            )
    return parts


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


class OrAuto(click.ParamType):
    """A number, or "auto".

    Args:
        name: in the help.
        number: reads the number; raises a ValueError if it is none.
        is_right: whether the number is allowed.
        expected: which numbers are.
        auto: what stands for "auto".

    Example:
        >>> count_or_auto(1).convert("4", None, None), count_or_auto(1).convert("auto", None, None)
        (4, 'auto')
        >>> SECONDS_OR_AUTO.convert("2.5", None, None), SECONDS_OR_AUTO.convert("auto", None, None)
        (2.5, None)
    """

    def __init__(
        self, name: str, number: Callable[[str], Any], is_right: Callable[[Any], bool], expected: str, auto: Any = AUTO
    ) -> None:
        self.name, self._auto = name, auto
        self._number, self._is_right, self._expected = number, is_right, expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == AUTO:
            return self._auto
        with contextlib.suppress(ValueError):
            number = self._number(value)
            if self._is_right(number):
                return number
        self.fail(f"{value!r}: expected {self._expected}, or auto.", param, ctx)


def count_or_auto(least: int) -> OrAuto:
    """The type of an option that takes a whole number, at least so large, or "auto"."""
    return OrAuto("K|auto", int, lambda count: count >= least, f"a whole number of at least {least}")


SECONDS_OR_AUTO = OrAuto("SECONDS|auto", float, lambda seconds: seconds > 0, "a positive number of seconds", auto=None)


class WorkerRange(click.ParamType):
    """A number of workers, or the fewest and the most as MIN:MAX.

    Example:
        >>> WorkerRange().convert("1:3", None, None), WorkerRange().convert("2", None, None)
        ((1, 3), (2, 2))
    """

    name = "N|MIN:MAX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        fewest, separator, most = value.partition(":")
        try:
            bounds = (int(fewest), int(most if separator else fewest))
        except ValueError:
            self.fail(f"{value!r} is not a valid integer. Expected a number, or MIN:MAX such as 1:3.", param, ctx)
        if separator and not 1 <= bounds[0] <= bounds[1]:
            self.fail(f"{value!r}: expected MIN:MAX with 1 <= MIN <= MAX, for example 1:3.", param, ctx)
        return bounds


class _OwnChoice(click.Option):
    """A choice that a variable of the user's makes, but not that of a launcher around this one."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        return None if RUN_ID in os.environ else super().resolve_envvar_value(ctx)


TRANSPORT_OPTION = click.option(
    "--transport",
    cls=_OwnChoice,
    type=click.Choice(TRANSPORTS),
    default=AUTO,
    envvar=TRANSPORT_VARIABLE,
    show_default=True,
    help="What carries the sums of MultiWorkerMirroredStrategy. auto: direct for CPUs, else tensorflow.",
)


class ScriptCommand(click.Command):
    """Leaves everything from the script on to the script, options included."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        with_value = {
            name
            for option in self.params
            if isinstance(option, click.Option) and not option.is_flag
            for name in option.opts
        }
        own, target = split(args, with_value)
        ctx.meta[TARGET] = target
        return super().parse_args(ctx, own)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        return super().shell_complete(ctx, incomplete) or [CompletionItem(incomplete, type="file")]

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", "SCRIPT", "[ARGS]..."]


def read_env(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """The variables of a repeatable option KEY=VALUE."""
    env = {}
    for text in values:
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise click.BadParameter(f"{text!r}: expected KEY=VALUE, for example --env TF_CPP_MIN_LOG_LEVEL=0.")
        env[name] = value
    return env
