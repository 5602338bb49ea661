"""What tfdist.planning predicts for figures that others have published: `python -m benchmarks.planning.published`.

With `--write-readme` it renews the table in README.md beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.data_parallel.table import fill
from benchmarks.markdown import table
from tfdist.planning.hardware import PRESETS, Device, Hardware, Link, all_reduce_seconds
from tfdist.planning.prediction import pipeline
from tfdist.planning.profile import LayerProfile, ModelProfile, Sample, StepCost

README = Path(__file__).parent / "README.md"
# GPipe, arXiv 1811.06965, table 2: training throughput of partitions K and micro-batches M; K = 2 and M = 1 is 1.
_GPIPE = {
    "GPipe, Transformer-48": {
        **{(2, 4): 1.7, (2, 32): 1.8, (4, 1): 1.07, (4, 4): 3.2, (4, 32): 3.4},
        **{(8, 1): 1.3, (8, 4): 4.8, (8, 32): 6.3},
    },
    "GPipe, AmoebaNet-D": {
        **{(2, 4): 1.07, (2, 32): 1.21, (4, 1): 1.13, (4, 4): 1.26, (4, 32): 1.84},
        **{(8, 1): 1.38, (8, 4): 1.72, (8, 32): 3.48},
    },
    # The same model, by torchgpipe, benchmarks/amoebanetd-speed.
    "torchgpipe, AmoebaNet-D": {
        **{(2, 4): 1.546, (2, 32): 1.780, (4, 1): 1.006, (4, 4): 1.680, (4, 32): 2.711},
        **{(8, 1): 0.932, (8, 4): 2.625, (8, 32): 4.966},
    },
}
# torchgpipe, benchmarks/resnet101-speed: by devices, micro-batches and the speed-up over one device without a pipeline.
_TORCHGPIPE = {1: (2, 0.853), 2: (1667, 1.414), 4: (256, 2.774), 8: (150, 4.294)}
# Horovod, arXiv 1802.05799: by model the images that one P100 trains on in a second (TensorFlow's published figures for
# batches of 64; that of ResNet-101 lies between those of ResNet-50 and ResNet-152), and the efficiency on 512 of them.
_HOROVOD = {"InceptionV3": (142.0, 299, 0.90), "ResNet101": (129.0, 224, 0.90), "VGG16": (154.0, 224, 0.68)}
_HOROVOD_ROWS, _HOROVOD_DEVICES = 64, 512
# Horovod's buffer, HOROVOD_FUSION_THRESHOLD.
_BUFFER = 64 * 2**20


class Figure(NamedTuple):
    """A published figure, and what is predicted for it."""

    source: str
    what: str
    published: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted by published, less one."""
        return self.predicted / self.published - 1


def figures() -> list[Figure]:
    """All of them. Takes some seconds, in which the models are built."""
    return [*_of_gpipe(), *_of_torchgpipe(), *_of_horovod()]


def _even(stages: int) -> tuple[ModelProfile, Hardware]:
    """A model of equal layers, and devices between which nothing takes time: what the papers' formulas assume."""
    rows = 8192
    samples = [
        Sample(n, StepCost(float(n), 0.0, 0.0), StepCost(0.0, 0.0, 0.0), 0.0, 0.0, []) for n in (rows // 4, rows)
    ]
    layers = [LayerProfile(str(i), 1.0, 1.0, 1.0, 0.0) for i in range(8)]
    device = Device(flops=float(rows), bandwidth=1e15, operation=0.0, memory=10**12)
    hardware = Hardware("equal devices", "GPU", {1: device}, stages, Link(0.0, 1e15), Link(0.0, 1e15), step=0.0)
    return ModelProfile("equal layers", rows, 1.0, 1.0, 0.0, (samples[0], samples[1]), layers), hardware


def _seconds(stages: int, microbatches: int, recompute: bool = True) -> float:
    found = pipeline(*_even(stages), stages, microbatches, "gpipe", recompute)
    assert found is not None
    return found.seconds


def _of_gpipe() -> Iterator[Figure]:
    for source, rows in _GPIPE.items():
        for (stages, microbatches), published in rows.items():
            predicted = _seconds(2, 1) / _seconds(stages, microbatches)
            yield Figure(source, f"K={stages}, M={microbatches}", published, predicted)


def _of_torchgpipe() -> Iterator[Figure]:
    plain = _seconds(1, 1, recompute=False)
    for stages, (microbatches, published) in _TORCHGPIPE.items():
        # It computes all micro-batches again but for the last one.
        again, once = _seconds(stages, microbatches), _seconds(stages, microbatches, recompute=False)
        seconds = again - (again - once) / microbatches
        yield Figure("torchgpipe, ResNet-101", f"K={stages}, M={microbatches}", published, plain / seconds)


def _of_horovod() -> Iterator[Figure]:
    import keras

    from tfdist.planning.profile import layers_of

    link = PRESETS["p100-25gbe"].link(_HOROVOD_DEVICES)
    for name, (images, side, published) in _HOROVOD.items():
        layers = layers_of(getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3)))
        work = sum(layer.work for layer in layers)
        step = _HOROVOD_ROWS / images
        backward = [step * 2 / 3 * layer.work / work for layer in layers]
        sizes = [layer.parameters for layer in layers]
        ways = {
            "": exposed_seconds(sizes, backward, _HOROVOD_DEVICES, link, _BUFFER),
            " (no overlap)": all_reduce_seconds(sum(sizes), _HOROVOD_DEVICES, link),
        }
        for how, waits in ways.items():
            yield Figure("Horovod, 512 P100", f"{name}, efficiency{how}", published, step / (step + waits))


def exposed_seconds(
    sizes: Sequence[float], backward: Sequence[float], devices: int, link: Link, bucket: float = 0.0
) -> float:
    """What an all-reduce that begins with the first gradients adds to a step, as the original Horovod does it.

    Gradients are ready from the last layer to the first one, and are sent in that order, one bucket after the other.

    Args:
        sizes: bytes of the gradients of each layer, from the first to the last one.
        backward: seconds of the backward pass of each layer, in the same order.
        devices: how many take part.
        link: between them.
        bucket: bytes that are collected before they are sent.

    Example:
        >>> link = Link(latency=0.0, bandwidth=1.0)
        >>> exposed_seconds([0, 3], [2, 1], 2, link), exposed_seconds([3, 0], [2, 1], 2, link)
        (1.0, 3.0)
        >>> exposed_seconds([1, 1], [2, 1], 2, link, bucket=2.0)
        2.0
    """
    computed = sent = waiting = 0.0
    for size, seconds in zip(reversed(sizes), reversed(backward), strict=True):
        computed += seconds
        waiting += size
        if waiting > 0 and waiting >= bucket:
            sent, waiting = max(sent, computed) + all_reduce_seconds(waiting, devices, link), 0.0
    if waiting:
        sent = max(sent, computed) + all_reduce_seconds(waiting, devices, link)
    return max(sent - computed, 0.0)


def render(found: list[Figure]) -> str:
    """As Markdown."""
    lines = [
        [each.source, each.what, f"{each.published:.2f}", f"{each.predicted:.2f}", f"{each.error:+.0%}"]
        for each in found
    ]
    return table(("Source", "Figure", "Published", "Predicted", "Error"), lines, left=2)


if __name__ == "__main__":
    text = render(figures())
    print(text)
    if "--write-readme" in sys.argv:
        README.write_text(fill(README.read_text(), text, "<!-- published -->", "<!-- /published -->"))
