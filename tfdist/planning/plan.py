"""`tfdist.plan`: what each strategy would need for a model, without training it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tfdist.plain_text import plain_text
from tfdist.planning.candidates import candidates
from tfdist.planning.hardware import Hardware
from tfdist.planning.prediction import Prediction
from tfdist.planning.profile import ModelProfile
from tfdist.planning.recommendation import Recommendation, recommend
from tfdist.planning.scaling import scaling
from tfdist.planning.starting import PROGRAM


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A row for each strategy that could train a model. Print it for a table.

    Attributes:
        profile: what a step of the model costs.
        hardware: what it would run on.
        rows: from simple to complicated; the first one is one device.
        recommendation: which of them to take, and why.
    """

    profile: ModelProfile
    hardware: Hardware
    rows: Sequence[Prediction]
    recommendation: Recommendation

    @property
    def shown(self) -> list[Prediction]:
        """The rows of the table: for several numbers of devices without those that keep less, where all fits anyway."""
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
        """The largest number of devices that still pays (see `tfdist.planning.scaling`); None if there is no choice."""
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
            notes.append(
                f"{len(self.rows) - len(shown)} rows with recompute, park or swap, which need not be, are left out."
            )
        if any(not row.fits for row in shown):
            notes.append(f"!: more than the {first.available / 1e9:.3g} GB of a device, or its share of them.")
        if any(not row.is_exact for row in shown):
            notes.append("a: asynchronous; batches a second, but not the same training as one process.")
        if (most := self.pays_up_to) is not None:
            notes.append(_paying(most, max(row.devices for row in self.rows)))
        title = f"A step of '{self.profile.name}' on {self.profile.rows} rows, predicted for {self.hardware.name}"
        return "\n\n".join(
            [title, plain_text(table), *(["\n".join(notes)] if notes else []), self.recommendation.reason]
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

    A step is traced for two batch sizes, as by `tfdist.memory.report`; operations, bytes and memory between them follow
    a straight line. How long a device needs for them is what `tfdist.planning.calibrate` has measured on this machine,
    or what `hardware` says.

    Args:
        model: a compiled model under no strategy, with known inputs.
        batch_size: rows of the global batch.
        data: a batch `(x, y)` of arrays instead, for models that do not tell their shapes.
        devices: how many may be used; several numbers for several groups of rows. By default what the hardware has.
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
    from tfdist.planning.profiling import profile_of

    counts = None if devices is None else numbers_of(devices)
    if hardware is None:
        from tfdist.planning.calibration import this_machine

        hardware = this_machine(max(counts) if counts else None)
    return plan_for(profile_of(model, batch_size, data), hardware_of(hardware), devices)


def plan_for(
    profile: ModelProfile, hardware: Hardware, devices: int | Sequence[int] | None = None, program: str = PROGRAM
) -> Plan:
    """The same for a profile that is there. Pure.

    Args:
        profile: of the model.
        hardware: what it would run on.
        devices: as for `plan`.
        program: what commands start: a script and its arguments.

    Raises:
        ValueError: for numbers of devices that make no sense.
    """
    wanted = [hardware.per_host] if devices is None else numbers_of(devices)
    rows = [
        dataclasses.replace(row, start=row.start.replace(PROGRAM, program))
        for row in candidates(profile, hardware, wanted)
    ]
    return Plan(profile, hardware, rows, recommend(rows))


def numbers_of(devices: int | Sequence[int]) -> list[int]:
    """The numbers of devices that a user means.

    Raises:
        ValueError: for numbers that make no sense.

    Example:
        >>> numbers_of(4), numbers_of((2, 4))
        ([4], [2, 4])
    """
    wanted = list(devices) if isinstance(devices, Sequence) else [devices]
    if not wanted or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in wanted):
        raise ValueError(f"Received: devices={devices!r}. Expected: whole numbers of at least 1.")
    return wanted


def hardware_of(hardware: Hardware | str) -> Hardware:
    """The hardware with this name, or the same.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(hardware, Hardware):
        return hardware
    from tfdist.planning.presets import PRESETS

    if hardware not in PRESETS:
        raise ValueError(
            f"Received: hardware={hardware!r}. Expected: one of {', '.join(map(repr, PRESETS))}, or a "
            "tfdist.planning.Hardware; without it, this machine is measured."
        )
    return PRESETS[hardware]


def _paying(most: int, planned: int) -> str:
    if most == 1:
        return "More devices do not make a step 1.5 times as fast each time that there are twice as many."
    beyond = "the most that were planned" if most >= planned else "and less beyond"
    return f"Twice as many devices make a step at least 1.5 times as fast up to {most}, {beyond}."
