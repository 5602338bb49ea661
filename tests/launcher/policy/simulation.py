"""`tfdist run` with simulated processes on a simulated clock; everything else is the launcher itself.

A program is a function that is given its process. As a generator it yields for how many seconds it does nothing, and
what it returns is its end as `subprocess` has it: 3 is an exit code, -9 a violent death. Seconds pass on the clock
only: minutes take milliseconds, and each event has the same time in every run.
"""

from __future__ import annotations

import functools
import heapq
import io
import itertools
import json
import math
import re
import signal
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from tfdist.launcher import operating_system, process, run, supervisor
from tfdist.launcher.command import main
from tfdist.launcher.guardian import Guardian
from tfdist.launcher.output import Terminal
from tfdist.launcher.plan import REPLACEMENT, Machine, ProcessPlan
from tfdist.supervision import events, progress

# How often the launcher looks. A power of two: sums of such times are exact.
TICK = 1 / 64
FOREVER = math.inf
# Far from 0, which is no time to the launcher.
_START = 4096.0
_LONGEST_RUN = 900.0

Life = Generator[float, None, int | None]


class Clock:
    """Stands in for the module `time`. Whoever sleeps lets what is planned happen, each thing at its own time."""

    def __init__(self) -> None:
        self._now = _START
        self._planned: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return self._now - _START

    def time(self) -> float:
        return self._now

    monotonic = time

    def after(self, seconds: float, act: Callable[[], object]) -> None:
        if seconds < FOREVER:
            heapq.heappush(self._planned, (self._now + seconds, next(self._order), act))

    def sleep(self, seconds: float) -> None:
        end = self._now + seconds
        assert end - _START < _LONGEST_RUN, "the launcher does not end"
        while self._planned and self._planned[0][0] <= end:
            self._now, _, act = heapq.heappop(self._planned)
            act()
        self._now = end


class SimulatedProcess:
    """Stands in for `tfdist.launcher.process.Process`, and is what a program acts with.

    Attributes:
        handlers: what the program does on a signal; None: nothing. It dies of others.
        printed: the lines of its log.
        has_helpers: whether processes that it started keep its group in existence until they are killed.
        state: as the kernel has it.
        end: what it has returned, whether the launcher has seen that or not.
        world: the run that it is part of.
        writer: where it reports its progress, if that is wanted.
    """

    # What it prints is seen in its log only.
    output = None
    # The kernel ends all that is killed.
    left_behind = ""
    # All run on this host, which cannot be lost.
    lost = ""

    def __init__(self, world: World, plan: ProcessPlan, log_dir: Path, *_: object) -> None:
        self.plan, self.name, self.index, self.job = plan, plan.name, plan.index, plan.job
        self.log_path = log_dir / plan.log_name
        self.status: int | None = None
        self.is_over = False
        self.group = next(world.numbers)
        self.restart, self.replacement = int(plan.env["TFDIST_RESTART"]), int(plan.env[REPLACEMENT] or 0)
        self.workers = len(json.loads(plan.env["TF_CONFIG"])["cluster"]["worker"])
        self.handlers: dict[int, Program | None] = {}
        self.printed: list[str] = []
        self.has_helpers = False
        self.state = "sleeping"
        self.end: int | None = None
        self.world = world
        self._life: Life | None = None
        self._started_at = self._ended_at = 0.0
        if path := plan.env[progress.VARIABLE]:
            self.writer = progress.ProgressWriter(path)
        world.processes.append(self)

    # For programs:

    def train(self, stop: int, resumed: int | None = None, pause: float = 0.25) -> Life:
        """Reports one step after the other, as a fit does."""
        self.writer.begin()
        if resumed is not None:
            self.writer.resumed(resumed)
        for step in range((resumed or 0) + 1, stop + 1):
            self.writer.report(progress.TRAINING, step)
            yield pause

    def serve(self) -> Life:
        """Ignores signals, and ends as soon as the process that drives has ended."""
        self.handlers = {signal.SIGTERM: None, signal.SIGINT: None}
        while self.world.is_driven():
            yield TICK

    def stop(self) -> Life:
        """Is stopped by somebody, until it is killed."""
        self.state = "stopped"
        yield FOREVER

    # For the launcher:

    def start(self) -> None:
        self._started_at = self.world.clock.monotonic()
        self._live(self.world.program)

    @property
    def lived(self) -> float:
        return self._ended_at - self._started_at

    def poll(self) -> bool:
        if self.status is None and self.end is not None:
            self.status, self._ended_at = self.end, self.world.clock.monotonic()
            return True
        self.is_over = self.status is not None and not self.has_helpers
        return False

    def signal(self, number: int) -> None:
        if self.end is None:
            self.world.signals.append((self.world.clock.seconds, self.name, signal.Signals(number)))
            if number == signal.SIGKILL:
                self.end = -number
            elif (
                self.state != "stopped" and (handler := self.handlers.get(number, lambda process: -number)) is not None
            ):
                self._live(handler)
        if number == signal.SIGKILL:
            self.has_helpers = False

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def tail(self, count: int) -> tuple[str, ...]:
        return tuple(self.printed[-count:])

    def close(self) -> None:
        pass

    def _live(self, program: Program) -> None:
        life = program(self)
        if isinstance(life, Generator):
            self._life = life
            self._go_on(life)
        else:
            self.end = life or 0

    def _go_on(self, life: Life) -> None:
        if self.end is not None or life is not self._life:
            return  # it is dead, or a signal has made it do something else
        try:
            self.world.clock.after(next(life), functools.partial(self._go_on, life))
        except StopIteration as end:
            self.end = end.value or 0


Program = Callable[[SimulatedProcess], "Life | int | None"]


@dataclass
class World:
    """What a simulated run consists of, and what happened in it."""

    program: Program
    clock: Clock = field(default_factory=Clock)
    numbers: itertools.count = field(default_factory=lambda: itertools.count(1 << 30))
    processes: list[SimulatedProcess] = field(default_factory=list)
    said: list[tuple[float, str]] = field(default_factory=list)
    signals: list[tuple[float, str, signal.Signals]] = field(default_factory=list)
    guarded: set[int] = field(default_factory=set)

    def is_driven(self) -> bool:
        """Whether the last process that was started to drive others has not ended."""
        drivers = [process for process in self.processes if not process.plan.serves]
        return drivers[-1].end is None


@dataclass(frozen=True)
class Run:
    """A run that is over. All times are seconds since its beginning.

    Attributes:
        code: exit code.
        seconds: how long it took.
        said: the launcher's messages but the first, and when it said them.
        events: the lines of events.jsonl.
        signals: which process got which signal, and when.
    """

    code: int
    seconds: float
    said: list[tuple[float, str]]
    events: list[dict]
    signals: list[tuple[float, str, signal.Signals]]

    @property
    def messages(self) -> list[str]:
        return [text for _, text in self.said]

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self.events]

    def of_kind(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["event"] == kind]


def simulate(
    folder: Path, program: Program, *options: str, signals: Sequence[tuple[float, signal.Signals]] = ()
) -> Run:
    """Runs a program.

    Args:
        folder: an empty one.
        program: what all processes do.
        *options: those of `tfdist run`.
        signals: what the launcher gets, and when.
    """
    world = World(program)
    clock = world.clock
    (folder / "train.py").touch()
    for seconds, number in signals:
        clock.after(seconds, functools.partial(_send, number))
    with pytest.MonkeyPatch.context() as patch:
        for module in (supervisor, process, operating_system, progress, events):
            patch.setattr(module, "time", clock)
        for module in (operating_system, process):
            patch.setattr(module, "_TICK", TICK)
        patch.setattr(process, "Process", functools.partial(SimulatedProcess, world))
        patch.setattr(process, "selectors", SimpleNamespace(DefaultSelector=functools.partial(_Selector, clock)))
        patch.setattr(supervisor, "Guardian", functools.partial(_Guardian, world.guarded))
        patch.setattr(run, "Terminal", SimpleNamespace(standard=functools.partial(_Terminal, world)))
        patch.setattr(run, "Machine", SimpleNamespace(this_one=lambda: Machine((0, 1))))
        patch.chdir(folder)
        # Forking from a process with imports behind it is another matter.
        arguments = ["run", "--log-dir", "logs", *options, "train.py"]
        code = main.main(arguments, standalone_mode=False)
    assert all(process.is_over for process in world.processes)
    assert not world.guarded
    lines = [json.loads(line) for line in (folder / "logs" / events.FILE_NAME).read_text().splitlines()]
    happened = [{**line, "time": line["time"] - _START} for line in lines]
    return Run(code, clock.seconds, world.said[1:], happened, world.signals)


def _send(number: signal.Signals) -> None:
    assert callable(signal.getsignal(number)), f"{number.name} would end the tests: the launcher does not wait for it"
    signal.raise_signal(number)


class _Selector:
    """Hears nothing, but time passes meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def select(self, timeout: float) -> list:
        self._clock.sleep(timeout)
        return []

    def close(self) -> None:
        pass


class _Guardian(Guardian):
    """Knows which groups it would have to kill."""

    def __init__(self, groups: set[int]) -> None:
        self.add, self.remove = lambda group, run="": groups.add(group), groups.remove

    def __enter__(self) -> _Guardian:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class _Terminal(Terminal):
    """Remembers the launcher's messages, and when it got them."""

    def __init__(self, world: World, live: str, env: object, hidden: re.Pattern[str] | None) -> None:
        super().__init__(io.BytesIO(), is_tty=False, live=live, hidden=hidden)
        self.world = world

    def message(self, text: str) -> None:
        self.world.said.append((self.world.clock.seconds, text))
