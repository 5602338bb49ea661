"""`tfdist.callbacks.PipelineTimeline`: a picture of what every stage of a pipeline does during one training step."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from statistics import median
from typing import Any

import keras

from tfdist.arguments import check_path
from tfdist.picture_formats import wanted_endings
from tfdist.strategies.pipeline.clock import Clock, clock_offsets
from tfdist.strategies.pipeline.schedule import Schedule
from tfdist.strategies.pipeline.strategy import PipelineStrategy
from tfdist.strategies.pipeline.timeline import Interval, save_picture, simulate, write_trace
from tfdist.strategies.pipeline.validation import MASKED, why_not_decomposable

_log = logging.getLogger("tfdist")


class PipelineTimeline(keras.callbacks.Callback):
    """Measures one training step of a fit under `PipelineStrategy`, and draws it above the predicted one.

    The picture has a row for each stage, and a box for each forward and backward of a micro-batch. The prediction is
    what the schedule would take if every box was as long as the median of its stage and kind, and nothing was in the
    way: gaps that are longer in the measured step are time that devices, or transfers, take from each other.

    For that step, and the one before it to warm up, the training function is traced with time stamps; afterwards it is
    traced without them, so that the rest of the fit runs as if there was no timeline.

    Args:
        path: file of the picture; its ending, such as `.png` or `.svg`, says in which format.
        step: which training step of the fit is measured, from 1; the first ones take longer than others. With
            `steps_per_execution` it is the last step of the execution that has it.
        trace: whether a file with the same name and the ending `.json` is written, too, for https://ui.perfetto.dev.

    Attributes:
        measured: when each instruction ran, in seconds; empty until that step is over.
        predicted: when each would have run.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if `step` is no whole number of at least 1, matplotlib does not know the format, or, in `fit`, the
            model is not under a `PipelineStrategy`.

    Example:
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.PipelineStrategy(["CPU:0", "CPU:0"], num_microbatches=4)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        ...     model.compile("adam", "mse")
        >>> timeline = tfdist.callbacks.PipelineTimeline("step.png", step=2)
        >>> history = model.fit(np.ones((32, 4)), np.ones((32, 1)), batch_size=8, callbacks=[timeline], verbose=0)
    """

    def __init__(self, path: str | os.PathLike[str], step: int = 3, trace: bool = True):
        super().__init__()
        check_path("path", path, "a picture, such as 'timeline.svg'")
        _check_format(path)
        if isinstance(step, bool) or not isinstance(step, Integral) or step < 1:
            raise ValueError(f"Received: step={step!r}. Expected: a whole number of at least 1, the step to measure.")
        self.path, self.step, self.trace = os.fspath(path), int(step), trace
        self.measured: list[Interval] = []
        self.predicted: list[Interval] = []
        self._clock: Clock | None = None
        self._steps = 0
        self._is_over = False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Checks the strategy."""
        strategy = self.model.distribute_strategy
        if not isinstance(strategy, PipelineStrategy):
            kind = type(strategy).__name__
            # What TensorFlow calls the strategy of a model that was created outside of any scope.
            name = "no strategy" if kind == "_DefaultDistributionStrategy" else kind
            raise ValueError(
                f"Received: PipelineTimeline in a fit under {name}. Expected: a model that is "
                "created and compiled in the scope of a tfdist.PipelineStrategy; only there are stages to draw. "
                "Leave the callback out."
            )
        self._stop_clock()  # of a fit that was interrupted
        self._steps, self._is_over = 0, False

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Puts time stamps into the training function when the step is near."""
        if self._is_over or self._clock is not None:
            return
        if self._steps + 2 * self.model.steps_per_execution >= self.step:
            self._clock = Clock()
            self._use_clock(self._clock)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Takes the time stamps out and draws, if it was that step."""
        self._steps += self.model.steps_per_execution
        if self._clock is None or self._steps < self.step:
            return
        clock, self._is_over = self._clock, True
        self._stop_clock()
        if clock.has_times:
            self._draw(clock)
        else:
            _log.warning("PipelineTimeline draws nothing: %s", _why_nothing(self.model))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Says so if the step never came."""
        self._stop_clock()
        if not self._is_over:
            _log.warning(
                "PipelineTimeline draws nothing: the fit had %d steps, and step=%d was to be measured.",
                self._steps,
                self.step,
            )

    def get_state(self) -> dict[str, Any]:
        """Returns nothing: a backup keeps no times."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing."""

    def _use_clock(self, clock: Clock | None) -> None:
        self.model.distribute_strategy._clock = clock
        # Keras takes the model's function anew for each step.
        self.model.make_train_function(force=True)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock = None
            self._use_clock(None)

    def _draw(self, clock: Clock) -> None:
        strategy = self.model.distribute_strategy
        schedule = strategy._prepare(self.model).schedule
        self.measured = clock.intervals(clock_offsets(strategy.devices[0]))
        self.predicted = _predict(schedule, self.measured)
        path = Path(self.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        title = f"{schedule.name}, {schedule.microbatches} micro-batches: training step {self._steps}"
        save_picture(path, self.measured, self.predicted, title)
        if self.trace:
            write_trace(path.with_suffix(".json"), self.measured, self.predicted)


def _predict(schedule: Schedule, measured: Sequence[Interval]) -> list[Interval]:
    """The step as its schedule would have it, with the median durations of what was measured."""
    seconds = {"forward": [[] for _ in range(schedule.chunks)], "backward": [[] for _ in range(schedule.chunks)]}
    for _, (kind, chunk, _), begin, end in measured:
        seconds[kind][chunk].append(end - begin)
    return simulate(schedule, **{kind: list(map(median, chunks)) for kind, chunks in seconds.items()})


def _why_nothing(model: keras.Model) -> str:
    if model.run_eagerly:
        return "the model is compiled with run_eagerly=True, where no stages work side by side."
    plan = model.distribute_strategy._prepare(model)
    reason = why_not_decomposable(plan.model, plan.functional) or MASKED
    return f"it knows steps only whose loss is computed micro-batch by micro-batch, but {reason}."


def _check_format(path: str | os.PathLike[str]) -> None:
    try:
        wanted = wanted_endings(path)
    except ImportError as error:
        raise ImportError(
            "PipelineTimeline draws with matplotlib, which cannot be imported: pip install 'matplotlib>=3.7'"
        ) from error
    if wanted:
        raise ValueError(
            f"Received: PipelineTimeline({os.fspath(path)!r}). Expected: a path that ends in one of "
            f"{', '.join(f'.{name}' for name in wanted)}."
        )
