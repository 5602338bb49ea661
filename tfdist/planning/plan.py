"""`tfdist.plan`: what each strategy would need for a model, which one to take, and how many devices pay."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any

import keras
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tfdist.plain_text import plain_text
from tfdist.planning.calibration import this_machine
from tfdist.planning.compression import advice
from tfdist.planning.hardware import Hardware, hardware_of
from tfdist.planning.pipelines import pipelines
from tfdist.planning.prediction import PROGRAM, Prediction, offloaded, parameter_servers, replicated
from tfdist.planning.profile import ModelProfile, profile_of

# Predictions are not more exact than this factor: of rows that are about as fast, the first is taken, the simplest.
_ABOUT = 1.2
# More devices pay if twice as many make a step at least this much faster.
_WORTH = 1.5
_PICTURE = (7.0, 4.5)


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to use.

    Attributes:
        best: the row; `None` if nothing fits.
        reason: a sentence or several.
    """

    best: Prediction | None
    reason: str


@dataclasses.dataclass(frozen=True)
class Scaling:
    """The best row for each number of devices, and one device.

    Attributes:
        one: one device; it may not fit.
        best: by number of devices, from few to many; `None` if nothing fits.
    """

    one: Prediction
    best: dict[int, Prediction | None]

    @property
    def pays_up_to(self) -> int:
        """The largest number of devices that still pays: twice as many make a step at least 1.5 times as fast.

        Example:
            >>> seconds = {1: 1.8, 2: 1.0, 4: 0.6, 8: 0.5}
            >>> rows = {n: Prediction("", "", {}, "", n, t, t, 0.0, 1.0, 2.0) for n, t in seconds.items()}
            >>> Scaling(rows[1], rows).pays_up_to
            4
        """
        found = 1
        previous = (1, self.one.seconds) if self.one.fits else None
        for count, row in self.best.items():
            if row is None:
                continue
            if previous is not None and _per_doubling(previous, (count, row.seconds)) < _WORTH:
                break
            found, previous = count, (count, row.seconds)
        return found


def scaling(predicted: Sequence[Prediction], devices: Sequence[int]) -> Scaling:
    """The best exact strategy for each number of devices; the global batch is the same."""
    one, *_ = predicted
    best: dict[int, Prediction | None] = {}
    for count in sorted(set(devices)):
        rows = [row for row in predicted if row.is_exact and row.devices == count and row.fits]
        best[count] = min(rows, key=lambda row: row.seconds, default=None)
    return Scaling(one, best)


def _per_doubling(before: tuple[int, float], after: tuple[int, float]) -> float:
    """By which factor a step gets faster for each doubling of the devices; arguments are devices and seconds."""
    (few, slow), (many, fast) = before, after
    if many <= few:
        return _WORTH
    return (slow / fast) ** (1 / math.log2(many / few))


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A row for each strategy that could train a model. Printed, it is a table.

    Attributes:
        profile: what a step of the model costs.
        hardware: what it would run on.
        rows: from simple to complicated; the first one is one device.
        recommendation: which row to take, and why.
        compression: whether sending less would pay; empty if nothing is sent.
    """

    profile: ModelProfile
    hardware: Hardware
    rows: Sequence[Prediction]
    recommendation: Recommendation
    compression: str = ""

    @property
    def shown(self) -> list[Prediction]:
        """The rows of the table. For several numbers of devices, rows that save memory needlessly are left out."""
        if len({row.devices for row in self.rows if row.devices > 1}) < 2:
            return list(self.rows)
        fitting = {(row.family, row.devices) for row in self.rows if row.mode == "none" and row.fits}
        return [
            row
            for row in self.rows
            if row.mode == "none" or row is self.recommendation.best or (row.family, row.devices) not in fitting
        ]

    @property
    def pays_up_to(self) -> int | None:
        """The largest number of devices that still pays (see `Scaling.pays_up_to`); None if there is no choice."""
        counts = sorted({row.devices for row in self.rows if row.devices > 1})
        return scaling(self.rows, counts).pays_up_to if len(counts) > 1 else None

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("strategy", no_wrap=True)
        for name in ("devices", "step, ms", "compute", "wait", "bubble", "sent, MB", "memory, GB", "speed-up"):
            table.add_column(name, justify="right", no_wrap=True)
        first = self.rows[0]
        shown = self.shown
        for row in shown:
            mark = ("* " if row is self.recommendation.best else "  ") + row.name
            memory = f"{row.memory / 1e9:.2f}" + ("" if row.fits else " !")
            bubble = "" if row.bubble is None else f"{row.bubble:.0%}"
            table.add_row(
                mark,
                str(row.devices),
                *(f"{1e3 * seconds:.4g}" for seconds in (row.seconds, row.compute, row.communication)),
                bubble,
                f"{row.sent / 1e6:.4g}" if row.sent else "",
                memory,
                f"{first.seconds / row.seconds:.2f}" + ("" if row.is_exact else " a"),
            )
        notes = [f"Note: {note}." for note in self.profile.notes]
        if len(shown) < len(self.rows):
            left_out = len(self.rows) - len(shown)
            notes.append(f"{left_out} rows with a memory mode are left out: the memory suffices without.")
        if any(not row.fits for row in shown):
            notes.append(f"!: more than the {first.available / 1e9:.3g} GB of a device, or its share of them.")
        if any(not row.is_exact for row in shown):
            notes.append("a: asynchronous; batches a second, but not the same training as one process.")
        if (most := self.pays_up_to) is not None:
            notes.append(_paying(most, max(row.devices for row in self.rows)))
        title = f"A step of '{self.profile.name}' on {self.profile.rows} rows, predicted for {self.hardware.name}"
        return "\n\n".join(
            [
                title,
                plain_text(table),
                *(["\n".join(notes)] if notes else []),
                " ".join(filter(None, [self.recommendation.reason, self.compression])),
            ]
        )


def plan(
    model: keras.Model,
    batch_size: int | None = None,
    *,
    data: Any = None,
    devices: int | Sequence[int] | None = None,
    hardware: Hardware | str | None = None,
) -> Plan:
    """Predicts memory, communication and time of a training step under each strategy, without training.

    A step is traced for two batch sizes, as by `tfdist.memory.report`; operations, bytes and memory of other sizes are
    interpolated. How fast a device is has been measured on this machine, or `hardware` says it.

    Args:
        model: a compiled model under no strategy, with known inputs.
        batch_size: rows of the global batch.
        data: a batch `(x, y)` of arrays instead, for models without known shapes.
        devices: how many may be used; several numbers give several groups of rows. By default what the hardware has.
        hardware: where it would run: a `tfdist.planning.Hardware`, or the name of one of `tfdist.planning.PRESETS`.
            By default this machine, which is measured when it is needed for the first time (half a minute).

    Raises:
        ValueError: if the model's step cannot be traced, or there is no such hardware.

    Example:
        >>> import keras, tfdist
        >>> model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64, "relu") for _ in range(4))])
        >>> model.compile("adam", "mse")
        >>> found = tfdist.plan(model, 128, devices=4, hardware="v100-nvlink")
        >>> found.rows[0].name, found.rows[0].devices
        ('one device', 1)
    """
    counts = None if devices is None else numbers_of(devices)
    if hardware is None:
        hardware = this_machine(max(counts) if counts else None)
    return plan_for(profile_of(model, batch_size, data), hardware_of(hardware), devices)


def plan_for(
    profile: ModelProfile, hardware: Hardware, devices: int | Sequence[int] | None = None, program: str = PROGRAM
) -> Plan:
    """A plan for a profile that is known. Pure.

    Args:
        program: what commands start: a script and its arguments.

    Raises:
        ValueError: for invalid numbers of devices.
    """
    wanted = [hardware.per_host] if devices is None else numbers_of(devices)
    rows = [
        dataclasses.replace(row, start=row.start.replace(PROGRAM, program))
        for row in candidates(profile, hardware, wanted)
    ]
    return Plan(profile, hardware, rows, recommend(rows), advice(profile, hardware, rows))


def numbers_of(devices: int | Sequence[int]) -> list[int]:
    """The numbers of devices as a list.

    Raises:
        ValueError: if one is no whole number of at least 1.

    Example:
        >>> numbers_of(4), numbers_of((2, 4))
        ([4], [2, 4])
    """
    wanted = list(devices) if isinstance(devices, Sequence) else [devices]
    if not wanted or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in wanted):
        raise ValueError(f"Received: devices={devices!r}. Expected: whole numbers of at least 1.")
    return wanted


def candidates(profile: ModelProfile, hardware: Hardware, devices: Sequence[int]) -> list[Prediction]:
    """Predictions for one device, and for each number of devices, from simple to complicated."""
    rows = list(replicated(profile, hardware, 1))
    streamed = offloaded(profile, hardware)
    rows += [streamed] if streamed is not None else []
    for count in dict.fromkeys(devices):
        if count == 1:
            continue
        rows += replicated(profile, hardware, count)
        rows += pipelines(profile, hardware, count)
        rows.append(parameter_servers(profile, hardware, count))
    return rows


def recommend(rows: Sequence[Prediction], one: Prediction | None = None, how_to_start: bool = True) -> Recommendation:
    """The fastest row that fits and computes the same as one process; of rows that are about as fast, the first one.

    Args:
        rows: from simple to complicated.
        one: the row of one device; by default the first one.
        how_to_start: whether to say how the script is started.

    Raises:
        ValueError: if there are no rows.

    Example:
        >>> one = Prediction("one device", "", {}, "python train.py", 1, 2.0, 2.0, 0.0, 5.0, 8.0)
        >>> two = Prediction("Mirrored", "MirroredStrategy", {}, "python train.py", 2, 1.1, 1.0, 0.1, 5.0, 8.0)
        >>> recommend([one, two]).best.name
        'Mirrored'
    """
    if not rows:
        raise ValueError("Received: a plan without rows. Expected: at least one, for one device.")
    exact = [row for row in rows if row.is_exact]
    fitting = [row for row in exact if row.fits]
    if not fitting:
        least = min(exact, key=lambda row: row.memory / row.available)
        return Recommendation(
            None,
            f"Nothing fits. {least.name} needs the least: {least.memory / 1e9:.3g} GB of {least.available / 1e9:.3g} "
            "GB on a device. Take a smaller batch, more devices, or devices with more memory.",
        )
    fastest = min(row.seconds for row in fitting)
    best = next(row for row in fitting if row.seconds <= _ABOUT * fastest)
    return Recommendation(best, " ".join(_reasons(best, rows, fitting, one or rows[0], how_to_start)))


def _reasons(
    best: Prediction, rows: Sequence[Prediction], fitting: Sequence[Prediction], one: Prediction, how_to_start: bool
) -> list[str]:
    how = f": {best.code}" if best.code else ""
    start = f", started by `{best.start}`" if how_to_start else ""
    gigabytes = f"{best.memory / 1e9:.3g} of {best.available / 1e9:.3g} GB"
    said = [f"Take {best.name}{how}{start}: {_time(best)} a step, {gigabytes} on a device."]
    if best is not one and one.fits and one.seconds < best.seconds:
        said.append(f"One process alone, with everything that these processes share, would need {_time(one)}.")
    elif best is not one and one.fits:
        said.append(f"That is {one.seconds / best.seconds:.2f} times as fast as one device.")
    elif best is not one:
        said.append(f"One device would need {one.memory / 1e9:.3g} GB.")
    several = [row for row in fitting if row.devices > 1]
    if best.devices == 1 and several:
        other = min(several, key=lambda row: row.seconds)
        why = f": {100 * other.communication / other.seconds:.0f} % of that would be waiting for each other"
        said.append(
            f"More devices do not pay: {other.name} on {other.devices} would take {_time(other)}"
            + (why if other.communication > 0.2 * other.seconds else "")
            + "."
        )
    else:
        others = [row for row in fitting if row.devices == best.devices and row.strategy != best.strategy]
        if others:
            other = min(others, key=lambda row: row.seconds)
            said.append(f"The next best on as many devices is {other.name} with {_time(other)}.")
    faster = [row for row in rows if row.is_exact and not row.fits and row.seconds * _ABOUT < best.seconds]
    if faster:
        other = min(faster, key=lambda row: row.seconds)
        said.append(f"{other.name} would be faster ({_time(other)}), but needs {other.memory / 1e9:.3g} GB.")
    return said


def _time(row: Prediction) -> str:
    return f"{1e3 * row.seconds:.3g} ms"


def _paying(most: int, planned: int) -> str:
    if most == 1:
        return "More devices do not make a step 1.5 times as fast each time that there are twice as many."
    beyond = "the most that were planned" if most >= planned else "and less beyond"
    return f"Twice as many devices make a step at least 1.5 times as fast up to {most}, {beyond}."


def points(scaling: Scaling) -> dict[str, list[tuple[int, float]]]:
    """The points of the picture: number of devices and speed-up over one device, by kind of strategy."""
    found: dict[str, list[tuple[int, float]]] = {}
    for count, row in scaling.best.items():
        if row is not None:
            found.setdefault(row.family, []).append((count, scaling.one.seconds / row.seconds))
    return found


def save_picture(path: str | os.PathLike[str], scaling: Scaling, title: str) -> None:
    """Draws the speed-up of the best strategy over the number of devices, beside the ideal speed-up.

    Args:
        path: file to write; its ending, such as `.png` or `.svg`, says in which format.
        scaling: what is drawn.
        title: above the picture.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=_PICTURE, layout="constrained")
    axes = figure.subplots()
    counts = sorted(scaling.best)
    axes.plot(counts, counts, color="0.7", linestyle="--", label="ideal")
    every = sorted(point for series in points(scaling).values() for point in series)
    axes.plot(*zip(*every, strict=True), color="0.5", linewidth=1, zorder=1) if every else None
    for kind, series in points(scaling).items():
        axes.plot(*zip(*series, strict=True), marker="o", linestyle="", label=kind)
    limit = scaling.pays_up_to
    axes.axvline(limit, color="0.4", linewidth=1, linestyle=":")
    axes.annotate(f"pays up to {limit}", (limit, 1), textcoords="offset points", xytext=(4, 2), color="0.3")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("devices")
    axes.set_ylabel("speed-up over one device (the batch stays the same)")
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
