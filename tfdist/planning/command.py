"""What `tfdist plan` does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.launch.arguments import Target
from tfdist.picture_endings import wanted_endings
from tfdist.planning.calibration import this_machine
from tfdist.planning.hardware import Hardware
from tfdist.planning.presets import PRESETS
from tfdist.planning.scaling import doublings
from tfdist.testing.local_cluster import LocalRunError

if TYPE_CHECKING:
    from tfdist.planning.plan import Plan


class PlanningError(ValueError):
    """A plan that cannot be made; says what to do."""


def plan(
    target: Target,
    devices: str | None,
    batch_size: int | None,
    hardware: str | None,
    calibrate: bool,
    save: str | None,
    plot: str | None,
    as_json: bool,
) -> str:
    """Returns what is to be printed; the arguments are the options of the command.

    Raises:
        PlanningError: if there is nothing to plan, or a step cannot be traced.
    """
    counts = numbers(devices) if devices else None
    # What can be known to fail, before the machine is measured.
    if plot:
        if not (counts and len(counts) > 1):
            raise PlanningError("--plot FILE: expected several numbers of --devices, such as --devices 1..64.")
        _check_drawable(plot)
    if hardware and calibrate:
        raise PlanningError("--hardware and --calibrate: expected one of them; this machine is what is measured.")
    if target.words:
        _check_program(target)
    elif not (save or calibrate):
        raise PlanningError("nothing to plan: expected a script. Example: tfdist plan train.py")
    found = _hardware(hardware, max(counts) if counts else None, calibrate)
    if save:
        with _files_of("--save", save):
            Path(save).write_text(found.to_json())
    if not target.words:
        return found.to_json()
    # Of a program's own output, nothing belongs to the JSON.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        made = _plan(target, batch_size, found, counts)
    if plot:
        with _files_of("--plot", plot):
            _draw(plot, made, counts or [])
    return _as_json(made) if as_json else str(made)


def numbers(text: str) -> list[int]:
    """The numbers of devices that a user means.

    Raises:
        PlanningError: for anything else.

    Example:
        >>> numbers("4"), numbers("2,4"), numbers("8..64")
        ([4], [2, 4], [8, 16, 32, 64])
    """
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = map(int, match.groups())
        found = doublings(first, last) if 0 < first <= last else []
    else:
        found = [int(part) for part in text.split(",")] if re.fullmatch(r"\d+(,\d+)*", text) else []
    if not found or min(found) < 1:
        raise PlanningError(f"--devices {text}: expected a number, several (2,4,8), or a range (8..1024).")
    return found


def _check_program(target: Target) -> None:
    if target.kind == "command":
        raise PlanningError(
            f"Received: {' '.join(target.words)!r}, a program that is not Python. Expected: a script, or -m MODULE."
        )
    try:
        target.command()
    except ValueError as error:
        raise PlanningError(str(error)) from None


def _check_drawable(path: str) -> None:
    try:
        wanted = wanted_endings(path)
    except ImportError:
        raise PlanningError(f"--plot {path}: a picture is drawn with matplotlib: pip install 'tfdist[plot]'") from None
    if wanted:
        raise PlanningError(f"--plot {path}: expected a name with one of the endings {', '.join(wanted)}.")


@contextlib.contextmanager
def _files_of(option: str, path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PlanningError(f"{option} {path}: {error.strerror}. Expected: a file that can be written.") from None


def _hardware(name: str | None, most: int | None, again: bool) -> Hardware:
    if name in PRESETS:
        return PRESETS[name]
    if name is None:
        try:
            return this_machine(most, again)
        except LocalRunError as error:
            raise PlanningError(f"this machine could not be measured: {error}") from None
    try:
        return Hardware.from_json(Path(name).read_text())
    except OSError:
        raise PlanningError(
            f"--hardware {name}: expected one of {', '.join(PRESETS)}, or a file that `tfdist plan --save FILE` has "
            "written."
        ) from None
    except ValueError as error:
        raise PlanningError(f"--hardware {name}: {error}") from None


def _plan(target: Target, batch_size: int | None, hardware: Hardware, counts: list[int] | None) -> Plan:
    # TensorFlow takes seconds to import: what is wrong with the options is said without it.
    from tfdist.planning.plan import plan_for
    from tfdist.planning.profiling import profile_of, with_rows
    from tfdist.planning.script import NoFit, model_and_batch

    try:
        # A fault of the program itself comes with its own traceback.
        model, batch = model_and_batch(target)
    except NoFit as error:
        raise PlanningError(str(error)) from None
    try:
        if batch_size is not None:
            batch = with_rows(batch, batch_size)
        return plan_for(profile_of(model, data=batch), hardware, counts, shlex.join(target.typed))
    except ValueError as error:
        raise PlanningError(str(error)) from error


def _draw(path: str, made: Plan, counts: list[int]) -> None:
    from tfdist.planning.picture import save_picture
    from tfdist.planning.scaling import scaling

    title = f"{made.profile.name}, {made.profile.rows} rows, on {made.hardware.name}"
    save_picture(path, scaling(made.rows, counts), title)


def _as_json(made: Plan) -> str:
    best = made.recommendation.best
    rows = [{**dataclasses.asdict(row), "code": row.code, "fits": row.fits, "best": row is best} for row in made.rows]
    said = {"hardware": made.hardware.name, "reason": made.recommendation.reason, "pays_up_to": made.pays_up_to}
    return json.dumps({**said, "rows": rows}, indent=1)
