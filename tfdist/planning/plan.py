"""`tfdist.plan`: what each strategy would need for a model, and which one to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tfdist.plain_text import plain_text
from tfdist.planning.calibration import this_machine
from tfdist.planning.hardware import Hardware, hardware_of
from tfdist.planning.prediction import PROGRAM, Prediction, pipelines, replicated
from tfdist.planning.profile import ModelProfile, profile_of

# Predictions are not more exact than this factor: of rows that are about as fast, the first is taken, the simplest.
_ABOUT = 1.2


@dataclasses.dataclass(frozen=True, repr=False)
class Plan:
    """A row for each strategy that could train a model. Printed, it is a table.

    Attributes:
        profile: what a step of the model costs.
        hardware: what it would run on.
        rows: from simple to complicated; the first one is one device.
    """

    profile: ModelProfile
    hardware: Hardware
    rows: Sequence[Prediction]

    @property
    def best(self) -> Prediction | None:
        """The recommended row; None if nothing fits."""
        return recommend(self.rows)

    @property
    def reason(self) -> str:
        """A sentence with the recommended row, or with what needs the least memory."""
        return too_large(self.rows) if self.best is None else f"Take {self.best}, started by `{self.best.start}`."

    def __repr__(self) -> str:
        first, best = self.rows[0], self.best
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
        table.add_column("strategy", no_wrap=True)
        for name in ("devices", "step, ms", "compute", "wait", "bubble", "sent, MB", "memory, GB", "speed-up"):
            table.add_column(name, justify="right", no_wrap=True)
        fitting = {(row.family, row.devices) for row in self.rows if row.mode == "none" and row.fits}
        for row in self.rows:
            # What saves memory is shown where that is needed.
            if row.mode != "none" and row is not best and (row.family, row.devices) in fitting:
                continue
            table.add_row(
                ("* " if row is best else "  ") + row.name,
                str(row.devices),
                *(f"{1e3 * seconds:.4g}" for seconds in (row.seconds, row.compute, row.communication)),
                "" if row.bubble is None else f"{row.bubble:.0%}",
                f"{row.sent / 1e6:.4g}" if row.sent else "",
                f"{row.memory / 1e9:.2f}" + ("" if row.fits else " !"),
                f"{first.seconds / row.seconds:.2f}",
            )
        title = f"A step of '{self.profile.name}' on {self.profile.rows} rows, predicted for {self.hardware.name}"
        return f"{title}\n\n{plain_text(table)}\n\n{self.reason}"


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
        hardware: where it would run: a `tfdist.planning.Hardware`, the name of one of `tfdist.planning.PRESETS`, or
            the path of a file that `tfdist plan --save` has written. By default this machine, which is measured when
            it is needed for the first time (half a minute).

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
    counts = [devices] if isinstance(devices, int) else devices
    hardware = this_machine(max(counts) if counts else None) if hardware is None else hardware_of(hardware)
    return plan_for(profile_of(model, batch_size, data), hardware, counts)


def plan_for(
    profile: ModelProfile, hardware: Hardware, devices: Sequence[int] | None = None, program: str = PROGRAM
) -> Plan:
    """A plan for a profile that is known. Pure.

    Args:
        program: what commands start: a script and its arguments.
    """
    rows = list(replicated(profile, hardware, 1))
    for count in dict.fromkeys(devices or [hardware.per_host]):
        if count > 1:
            rows += replicated(profile, hardware, count)
            rows += pipelines(profile, hardware, count)
    return Plan(
        profile, hardware, [dataclasses.replace(row, start=row.start.replace(PROGRAM, program)) for row in rows]
    )


def recommend(rows: Sequence[Prediction]) -> Prediction | None:
    """The fastest row that fits; of rows that are about as fast, the first one.

    Args:
        rows: from simple to complicated.

    Example:
        >>> one = Prediction("one device", "", {}, "python train.py", 1, 2.0, 2.0, 0.0, 5.0, 8.0)
        >>> two = Prediction("Mirrored", "MirroredStrategy", {}, "python train.py", 2, 1.1, 1.0, 0.1, 5.0, 8.0)
        >>> recommend([one, two]).name
        'Mirrored'
    """
    fitting = [row for row in rows if row.fits]
    fastest = min((row.seconds for row in fitting), default=0.0)
    return next((row for row in fitting if row.seconds <= _ABOUT * fastest), None)


def too_large(rows: Sequence[Prediction]) -> str:
    """What to say where nothing fits."""
    least = min(rows, key=lambda row: row.memory / row.available)
    return f"Nothing fits. The least is {least}: take a smaller batch, more devices, or devices with more memory."
