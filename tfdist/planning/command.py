"""The command `tfdist plan`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shlex
import sys
from pathlib import Path

import click

from tfdist.launcher.arguments import FILE, TARGET, Refusal, ScriptCommand, Target, refused
from tfdist.planning.hardware import Hardware, hardware_of

_HARDWARE_HELP = "Where it would run.  [default: this machine]"


@click.command(cls=ScriptCommand, short_help="Predict which strategy trains a script fastest, and what it needs.")
@click.option("--devices", metavar="N|N,N", help="How many may be used.  [default: those of the hardware]")
@click.option("--batch-size", type=click.IntRange(min=1), help="Rows of the global batch.  [default: the script's]")
@click.option("--hardware", metavar="NAME|FILE", help=_HARDWARE_HELP)
@click.option("--calibrate", is_flag=True, help="Measure this machine, even if it is known. It should be idle.")
@click.option("--save", type=FILE, help="Write down the hardware as JSON, for --hardware elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
@click.pass_context
def plan(
    ctx: click.Context,
    devices: str | None,
    batch_size: int | None,
    hardware: str | None,
    calibrate: bool,
    save: str | None,
    as_json: bool,
) -> None:
    """Predict what each strategy needs for SCRIPT: memory, communication and time of a step, without training.

    SCRIPT is run up to its first call of fit, with strategies that do nothing. This machine is measured when it is
    needed for the first time. Without SCRIPT, --calibrate and --save only do that.
    """
    target: Target = ctx.meta[TARGET]
    counts = numbers(devices) if devices else None
    # Wrong options are refused before the machine is measured, which takes long.
    if not (target.words or save or calibrate):
        raise Refusal("nothing to plan: expected a script. Example: tfdist plan train.py")
    if target.kind == "command":
        raise Refusal(
            f"Received: {' '.join(target.words)!r}, a program that is not Python. Expected: a script, or -m MODULE."
        )
    # TensorFlow takes seconds to import: wrong options are refused without it.
    with refused(ValueError):
        if target.words:
            target.command()
        found = _hardware(hardware, max(counts) if counts else None, calibrate)
    if save:
        with refused(OSError):
            Path(save).write_text(found.to_json())
    if not target.words:
        print(found.to_json())
        return
    from tfdist.planning.plan import plan_for
    from tfdist.planning.profile import profile_of, with_rows
    from tfdist.planning.script import NoFitError, model_and_batch

    # The program's own output must not get into the JSON. An error of the program is shown with its own traceback.
    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext(), refused(NoFitError):
        model, batch = model_and_batch(target)
    with refused(ValueError):
        batch = batch if batch_size is None else with_rows(batch, batch_size)
        made = plan_for(profile_of(model, data=batch), found, counts, shlex.join(target.typed))
    if not as_json:
        print(made)
        return
    best = made.best
    rows = [{**dataclasses.asdict(row), "code": row.code, "fits": row.fits, "best": row is best} for row in made.rows]
    print(json.dumps({"hardware": found.name, "reason": made.reason, "rows": rows}, indent=1))


def numbers(text: str) -> list[int]:
    """The numbers of devices in a `--devices` option.

    Raises:
        Refusal: for any other text.

    Example:
        >>> numbers("4"), numbers("2,4")
        ([4], [2, 4])
    """
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise Refusal(f"--devices {text}: expected a number, or several (2,4,8).")
    return [int(part) for part in text.split(",")]


def _hardware(name: str | None, most: int | None, again: bool) -> Hardware:
    if name is not None:
        return hardware_of(name)
    from tfdist.launcher.local.local_cluster import LocalRunError
    from tfdist.planning.calibration import this_machine

    try:
        return this_machine(most, again)
    except LocalRunError as error:
        raise Refusal(f"this machine could not be measured: {error}") from None
