"""What is asked for when a job is submitted, whatever scheduler runs it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import click

from tfdist.cluster.variables import AUTO, HOROVOD, SERVERS, TOKEN, TRANSPORT_VARIABLE
from tfdist.launcher.arguments import Refusal, Target
from tfdist.launcher.plan import RESERVED, runtime_defaults
from tfdist.supervision.events import VARIABLE as EVENT_LOG

# These variables tell a process of a job what it is.
_OF_PROCESS = (*RESERVED, SERVERS, EVENT_LOG, "TFDIST_SIZE", "TFDIST_RANK")
# tfdist sets these variables for each process of a job; a value from --env would contradict them.
_OWN = (*_OF_PROCESS, TOKEN)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_WRITTEN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_CLOCK = re.compile(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)")


class SubmitError(Refusal):
    """A job cannot be submitted, found or ended; the text says what was received, what was expected and what to do.

    Example:
        >>> raise SubmitError("Received: ... Expected: ...")
        Traceback (most recent call last):
        tfdist.jobs.request.SubmitError: Received: ... Expected: ...
    """


def _check(is_right: object, received: str, expected: str) -> None:
    if not is_right:
        raise SubmitError(f"Received: {received}. Expected: {expected}")


class UnansweredError(SubmitError):
    """The scheduler has not said whether it did what it was asked to do."""


@dataclass(frozen=True)
class Request:
    """A job to be run.

    Attributes:
        scheduler: one of tfdist.jobs.SCHEDULERS.
        target: the program.
        workers: number of training processes.
        ps: number of parameter servers; a chief is added, which drives the workers.
        transport: what carries the sums of `tfdist.MultiWorkerMirroredStrategy`.
        cpus_per_worker: cores of each process; None for the scheduler's default.
        gpus_per_worker: GPUs of each process; None for the scheduler's default.
        image: container image, for Kubernetes.
        name: of the job; by default that of the program.
        time_limit: in seconds; None if the user sets none.
        pack: whether the workers are to run on as few hosts as possible.
        max_restarts: how often the training is started again after a failure.
        grace: seconds between SIGTERM and SIGKILL.
        env: additional environment variables.
        volumes: mount path by name of a persistent volume claim, for Kubernetes.

    Raises:
        SubmitError: for values that are invalid or contradict each other.

    Example:
        >>> Request("slurm", Target("script", ("examples/train.py",)), workers=4, ps=1).tasks
        6
    """

    scheduler: str
    target: Target
    workers: int = 2
    ps: int = 0
    transport: str = AUTO
    cpus_per_worker: int | None = None
    gpus_per_worker: int | None = None
    image: str | None = None
    name: str = ""
    time_limit: int | None = None
    pack: bool = False
    max_restarts: int = 3
    grace: int = 60
    env: Mapping[str, str] = field(default_factory=dict)
    volumes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        on_kubernetes, option = self.scheduler == "kubernetes", "--image" if self.image else "--volume"
        _check(self.target.words, "no program", "a script, as in tfdist submit --scheduler slurm -n 4 train.py")
        _check(self.image or not on_kubernetes, "--scheduler kubernetes and no --image", "an image with your program")
        is_right = on_kubernetes or not (self.image or self.volumes)
        _check(is_right, f"{option} and --scheduler {self.scheduler}", f"{option} for Kubernetes only")
        is_right = not self.ps or self.transport != HOROVOD
        _check(is_right, f"--transport {self.transport} and --ps {self.ps}", "only one of them")
        if not self.name:
            object.__setattr__(self, "name", default_name(self.target))
        words = "at most 63 letters, digits, dots, hyphens and underscores, a letter or a digit first"
        _check(_NAME.fullmatch(self.name), f"--name {self.name!r}", words)
        for name in self.env:
            words = "--transport" if name == TRANSPORT_VARIABLE else "another variable: tfdist sets this one itself"
            _check(name not in _OWN, f"--env {name}=...", words)
            _check(_VARIABLE.fullmatch(name), f"--env {name}=...", "the name of an environment variable")

    def command(self) -> tuple[str, ...]:
        """The argument vector of the program, where the files of this machine are.

        Raises:
            SubmitError: there is no such program.
        """
        try:
            return self.target.command()
        except ValueError as error:
            raise SubmitError(str(error)) from None

    @property
    def tasks(self) -> int:
        """The number of all processes."""
        return self.workers + (1 + self.ps if self.ps else 0)

    @property
    def of_all(self) -> dict[str, str]:
        """The variables that all processes get, under every scheduler.

        Example:
            >>> Request("slurm", Target("script", ("train.py",)), ps=1).of_all
            {'TFDIST_TRANSPORT': 'auto', 'TFDIST_PS': '1'}
        """
        return {TRANSPORT_VARIABLE: self.transport, **({SERVERS: str(self.ps)} if self.ps else {})}

    @property
    def runtime_defaults(self) -> dict[str, str]:
        """Default variables of each process, which the user's values override. Threads are set only for known cores.

        Example:
            >>> sorted(Request("slurm", Target("script", ("train.py",))).runtime_defaults)
            ['MALLOC_TOP_PAD_', 'TF_CPP_MIN_LOG_LEVEL']
        """
        cores = self.cpus_per_worker or 0
        defaults = runtime_defaults(cores, cores, ps_cluster=self.ps > 0)
        return {name: value for name, value in defaults.items() if cores or "THREADS" not in name}


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a job is submitted, for the job: what it tells a process of another one is left out.

    Example:
        >>> outside_of_jobs({"HOME": "/home/me", "TF_CONFIG": "{}", "TFDIST_RUN_ID": "7"})
        {'HOME': '/home/me'}
    """
    return {name: value for name, value in environ.items() if name not in _OF_PROCESS}


def default_name(target: Target) -> str:
    """The default name of a job, made from the name of its program.

    Example:
        >>> default_name(Target("script", ("examples/train_digits.py", "--epochs", "3")))
        'train_digits'
        >>> default_name(Target("module", ("package.train",)))
        'train'
    """
    program = target.words[0]
    base = program.rpartition(".")[2] if target.kind == "module" else os.path.splitext(os.path.basename(program))[0]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip(".-_")[:40] or "job"


def seconds_of(text: str) -> int:
    """Seconds of a time such as "90m", "1d12h" or, as for Slurm, "1-12:00:00". A number without a unit is refused.

    Raises:
        click.BadParameter: for any other text, and for no time at all.

    Example:
        >>> seconds_of("1h30m"), seconds_of("1-12:00:00")
        (5400, 129600)
    """
    match = _WRITTEN.fullmatch(text) or _CLOCK.fullmatch(text)
    numbers = [int(number or 0) for number in match.groups()] if match else []
    seconds = sum(number * unit for number, unit in zip(numbers, _UNITS.values(), strict=False))
    if seconds == 0:
        raise click.BadParameter(
            f"Received: {text!r}. Expected: a time such as 2h, 90m, 1d12h or 01:30:00, with its unit"
        )
    return seconds
