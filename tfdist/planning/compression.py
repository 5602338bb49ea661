"""Whether compressing gradients would pay: what is not sent, against the time that it takes to compress."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tfdist.compression import PowerSGD
from tfdist.planning.hardware import Hardware, all_reduce_seconds
from tfdist.planning.prediction import Prediction
from tfdist.planning.profile import ModelProfile

_METHOD = PowerSGD(rank=4)
# How often all gradients are read or written: rests added and renewed, four products with thin matrices.
_PASSES = 12
_PRODUCTS = 4
_OPERATIONS = 25
# As between rows of a plan.
_ABOUT = 1.2
_BYTES = 4
_REPLICATED = ("MirroredStrategy", "MultiWorkerMirroredStrategy", "HorovodStrategy")


def advice(profile: ModelProfile, hardware: Hardware, rows: Sequence[Prediction]) -> str:
    """A sentence about the fastest data-parallel row; empty if there is none."""
    several = [
        row
        for row in rows
        if row.strategy in _REPLICATED and row.devices > 1 and row.mode == "none" and not row.is_sharded
    ]
    if not several or not profile.shapes:
        return ""
    row = min(several, key=lambda row: row.seconds)
    seconds, sent = compressed(profile, hardware, row)
    # One device may be faster than several that exchange little.
    best = min((one for one in rows if one.fits and one.devices == 1), key=lambda one: one.seconds, default=row)
    pays = seconds * _ABOUT < min(row.seconds, best.seconds)
    which = f"with compression=tfdist.compression.PowerSGD(rank={_METHOD.rank}), {row.name} on {row.devices}"
    text = (
        f"Compression would{'' if pays else ' not'} pay: {which} would send {sent / 1e6:.3g} MB instead of "
        f"{row.sent / 1e6:.3g} MB, and take {1e3 * seconds:.3g} ms instead of {1e3 * row.seconds:.3g} ms."
    )
    if pays:
        return f"{text} It is another training than that of one process."
    return (
        text if seconds * _ABOUT >= row.seconds else f"{text} Without, {best.name} takes {1e3 * best.seconds:.3g} ms."
    )


def compressed(profile: ModelProfile, hardware: Hardware, row: Prediction) -> tuple[float, float]:
    """Seconds of a step, and bytes that a device sends in it, if PowerSGD compresses the gradients of a row."""
    device = hardware.device(row.devices)
    link = hardware.link(row.devices, row.strategy == "HorovodStrategy")
    numbers = sum(_METHOD.numbers(shape) - math.prod(shape) for shape in profile.shapes)
    size = profile.trainable + _BYTES * numbers
    large = [shape for shape in profile.shapes if _METHOD.numbers(shape) < math.prod(shape)]
    elements = sum(map(math.prod, large))
    seconds = _PASSES * _BYTES * elements / device.bandwidth + _OPERATIONS * len(large) * device.operation
    seconds += 2 * _PRODUCTS * _METHOD.rank * elements / device.flops
    # The two factors, one after the other.
    seconds += 2 * all_reduce_seconds(size / 2, row.devices, link)
    whole = all_reduce_seconds(profile.trainable, row.devices, link)
    return row.seconds - whole + seconds, row.sent * size / profile.trainable
