"""The command `tfdist plan`."""

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

import click
from click.shell_completion import CompletionItem

from tfdist.launcher.arguments import FILE, TARGET, ScriptCommand, Target
from tfdist.picture_formats import wanted_endings
from tfdist.planning.hardware import PRESETS, Hardware

if TYPE_CHECKING:
    from tfdist.planning.plan import Plan

_HARDWARE_HELP = "Where it would run.  [default: this machine]"


def _machines(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What may be typed as hardware: a known name, else a file."""
    names = [CompletionItem(name) for name in PRESETS if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="file")]


class PlanningError(click.ClickException):
    """A plan that cannot be made; the message says what to do."""


@click.command(cls=ScriptCommand, short_help="Predict which strategy trains a script fastest, and what it needs.")
@click.option("--devices", metavar="N|N,N|N..M", help="How many may be used.  [default: those of the hardware]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows of the global batch.  [default: the script's]")
@click.option("--hardware", metavar="NAME|FILE", shell_complete=_machines, help=_HARDWARE_HELP)
@click.option("--calibrate", is_flag=True, help="Measure this machine, even if it is known. It should be idle.")
@click.option("--save", type=FILE, help="Write down the hardware as JSON, for --hardware elsewhere.")
@click.option("--plot", type=FILE, help="Draw the speed-up over the number of devices, as .png or .svg.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.pass_context
def plan(
    ctx: click.Context,
    devices: str | None,
    batch_size: int | None,
    hardware: str | None,
    calibrate: bool,
    save: str | None,
    plot: str | None,
    as_json: bool,
) -> None:
    """Predict what each strategy needs for SCRIPT: memory, communication and time of a step, without training.

    SCRIPT is run up to its first call of fit, with strategies that do nothing. This machine is measured when it is
    needed for the first time. Without SCRIPT, --calibrate and --save only do that.
    """
    target: Target = ctx.meta[TARGET]
    counts = numbers(devices) if devices else None
    # Wrong options are refused before the machine is measured, which takes long.
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
        print(found.to_json())
        return
    # The program's own output must not get into the JSON.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        made = _plan(target, batch_size, found, counts)
    if plot:
        with _files_of("--plot", plot):
            _draw(plot, made, counts or [])
    print(_as_json(made) if as_json else made)


def numbers(text: str) -> list[int]:
    """The numbers of devices in a `--devices` option. A range is doubled from its first to its last number.

    Raises:
        PlanningError: for any other text.

    Example:
        >>> numbers("4"), numbers("2,4"), numbers("8..40")
        ([4], [2, 4], [8, 16, 32, 40])
    """
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = map(int, match.groups())
        doubled = [first << times for times in range(last.bit_length()) if first << times < last]
        found = [*doubled, last] if 0 < first <= last else []
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
        raise PlanningError(f"--plot {path}: a picture needs matplotlib: pip install 'matplotlib>=3.7'") from None
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
        from tfdist.launcher.local.local_cluster import LocalRunError
        from tfdist.planning.calibration import this_machine

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
    # TensorFlow takes seconds to import: wrong options are refused without it.
    from tfdist.planning.plan import plan_for
    from tfdist.planning.profile import profile_of, with_rows
    from tfdist.planning.script import NoFitError, model_and_batch

    try:
        # An error of the program itself is shown with its own traceback.
        model, batch = model_and_batch(target)
    except NoFitError as error:
        raise PlanningError(str(error)) from None
    try:
        if batch_size is not None:
            batch = with_rows(batch, batch_size)
        return plan_for(profile_of(model, data=batch), hardware, counts, shlex.join(target.typed))
    except ValueError as error:
        raise PlanningError(str(error)) from error


def _draw(path: str, made: Plan, counts: list[int]) -> None:
    from tfdist.planning.plan import save_picture, scaling

    title = f"{made.profile.name}, {made.profile.rows} rows, on {made.hardware.name}"
    save_picture(path, scaling(made.rows, counts), title)


def _as_json(made: Plan) -> str:
    best = made.recommendation.best
    rows = [{**dataclasses.asdict(row), "code": row.code, "fits": row.fits, "best": row is best} for row in made.rows]
    said = {"hardware": made.hardware.name, "reason": made.recommendation.reason, "pays_up_to": made.pays_up_to}
    return json.dumps({**said, "rows": rows}, indent=1)
