"""Predictions for pipelines. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from tfdist.layer_graph.partition import balance
from tfdist.memory.estimate import MARGIN
from tfdist.planning.hardware import Hardware
from tfdist.planning.prediction import IN_ONE_PROCESS, Prediction, gpus, start_of
from tfdist.planning.profile import LayerProfile, ModelProfile, Sample
from tfdist.strategies.pipeline.schedule import Interval, Schedule, idle_share, make_schedule, makespan, simulate

SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved")
_CHUNKS = {"interleaved": 2}
# Longer pipelines are not simulated: models hardly ever have enough layers.
_MOST_STAGES = 32
# Multiples of the number of stages. More micro-batches shorten the bubble, but their matrices are small.
_MICRO_BATCHES = (1, 2, 4, 8)


def pipelines(profile: ModelProfile, hardware: Hardware, stages: int) -> Iterator[Prediction]:
    """The best number of micro-batches of each schedule, with and without recomputation."""
    for name in SCHEDULES if stages <= _MOST_STAGES else ():
        for recompute in (False, True):
            found = [
                predicted
                for times in _MICRO_BATCHES
                if times * stages <= profile.rows
                and (predicted := pipeline(profile, hardware, stages, times * stages, name, recompute)) is not None
            ]
            if found:
                yield min(found, key=lambda each: (not each.fits, each.seconds))


def pipeline(
    profile: ModelProfile, hardware: Hardware, stages: int, microbatches: int, name: str, recompute: bool = False
) -> Prediction | None:
    """One pipeline; `None` if the model cannot be cut into as many pieces.

    Args:
        stages: number of devices, K.
        microbatches: into how many parts a batch is cut, M.
        name: of the schedule.
        recompute: whether backward passes run the forward pass again.
    """
    schedule = make_schedule(name, stages, microbatches, _CHUNKS.get(name, 1))
    pieces = cut(profile.layers, schedule.chunks)
    if pieces is None:
        return None
    device = hardware.device(stages)
    micro = profile.at(profile.rows / microbatches)
    intervals = timeline(profile, hardware, schedule, pieces, recompute)
    update = profile.at(profile.rows).update.seconds(device)
    parameters = sum(layer.parameters for layer in profile.layers) or 1.0
    on_device = [[layer for piece in pieces[d::stages] for layer in piece] for d in range(stages)]
    largest = max(sum(layer.parameters for layer in layers) for layers in on_device) / parameters
    span = makespan(intervals)
    idle = idle_share(intervals)
    seconds = span + update * largest + hardware.step
    busy = span * (1 - idle)
    variables = profile.weights + profile.slots + profile.trainable
    memory = max(
        variables * sum(layer.parameters for layer in layers) / parameters
        + _held(profile, micro, schedule, pieces, d, recompute)
        for d, layers in enumerate(on_device)
    )
    in_one_process = hardware.kind == "GPU" and stages <= hardware.per_host
    mode = "recompute" if recompute else "none"
    options: dict[str, Any] = {
        **(gpus(hardware, stages) if in_one_process else {}),
        **{"num_microbatches": microbatches, "schedule": name, "memory": mode},
    }
    return Prediction(
        f"Pipeline {name}, M={microbatches}" + (", recompute" if recompute else ""),
        "PipelineStrategy",
        options,
        # The workers of a job on several hosts are its stages.
        IN_ONE_PROCESS
        if in_one_process
        else start_of(hardware, stages, f"--stages {stages}" if stages <= hardware.per_host else ""),
        stages,
        seconds,
        busy + update * largest + hardware.step,
        max(seconds - busy - update * largest - hardware.step, 0.0),
        memory + micro.batch * microbatches + device.reserved,
        device.memory,
        profile.rows * max(_sent(pieces, d, stages) for d in range(stages)),
        (profile.weights + profile.slots) * largest,
        bubble=idle,
        mode=mode,
    )


def _sent(pieces: Sequence[Sequence[LayerProfile]], device: int, stages: int) -> float:
    """Bytes that a device sends for a row: outputs of its pieces to the next ones, and gradients of their inputs."""
    arrives = [piece[0].arrives for piece in pieces]
    own = range(device, len(pieces), stages)
    return sum(arrives[chunk + 1] for chunk in own if chunk + 1 < len(pieces)) + sum(arrives[c] for c in own if c > 0)


def cut(layers: Sequence[LayerProfile], parts: int) -> list[list[LayerProfile]] | None:
    """Consecutive pieces of about the same work, as `PipelineStrategy` cuts; `None` if there are too few layers.

    Example:
        >>> layers = [LayerProfile(str(i), work=1.0, parameters=4, outputs=4, arrives=4) for i in range(4)]
        >>> [[layer.name for layer in piece] for piece in cut(layers, 2)]
        [['0', '1'], ['2', '3']]
    """
    forbidden = [position for position, layer in enumerate(layers) if not layer.cuttable]
    try:
        positions = balance([layer.work for layer in layers], parts, (), forbidden)
    except ValueError:
        return None
    return [list(layers[begin:end]) for begin, end in pairwise([0, *positions, len(layers)])]


def timeline(
    profile: ModelProfile,
    hardware: Hardware,
    schedule: Schedule,
    pieces: Sequence[Sequence[LayerProfile]],
    recompute: bool,
) -> list[Interval]:
    """What each device computes at which time of a step, without the update of the weights."""
    device, link = hardware.device(schedule.devices), hardware.link(schedule.devices)
    rows = profile.rows / schedule.microbatches
    seconds = profile.at(rows).compute.seconds(device)
    works = [sum(layer.work for layer in piece) for piece in pieces]
    all_work = sum(works) or 1.0
    # For each product of the forward pass, the backward pass computes two. It also adds gradients to earlier ones.
    forward = [seconds * work / all_work / 3 for work in works]
    sums = [3 * sum(layer.parameters for layer in piece) / device.bandwidth for piece in pieces]
    backward = [(3 if recompute else 2) * value + add for value, add in zip(forward, sums, strict=True)]
    messages = [rows * piece[0].arrives for piece in pieces[1:]]
    if hardware.kind == "GPU" or not messages:
        return simulate(schedule, forward, backward, max(map(link.seconds, messages), default=0.0))
    # Processes on cores copy the messages themselves, at both ends: that is time in which they do not compute.
    for chunk, size in enumerate(messages):
        for times in (forward, backward):
            times[chunk] += size / link.bandwidth
            times[chunk + 1] += size / link.bandwidth
    return simulate(schedule, forward, backward, link.latency)


def _held(
    profile: ModelProfile,
    micro: Sample,
    schedule: Schedule,
    pieces: Sequence[Sequence[LayerProfile]],
    device: int,
    recompute: bool,
) -> float:
    """Bytes that the micro-batches in flight keep on a device, and that one of them needs while it computes."""
    outputs = sum(layer.outputs for layer in profile.layers) or 1.0
    in_flight = schedule.in_flight()
    held, most = 0.0, 0.0
    for chunk in range(device, schedule.chunks, schedule.devices):
        of_one = micro.peak * sum(layer.outputs for layer in pieces[chunk]) / outputs
        stays = micro.rows * pieces[chunk][0].arrives if recompute else of_one
        held += stays * in_flight[chunk]
        most = max(most, of_one if recompute else 0.0)
    return MARGIN * (held + most)
