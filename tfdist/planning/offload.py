"""Predictions for weights that are kept on the host. Pure."""

from __future__ import annotations

from tfdist.planning.hardware import Hardware
from tfdist.planning.prediction import Prediction
from tfdist.planning.profile import ModelProfile
from tfdist.planning.starting import IN_ONE_PROCESS


def offloaded(profile: ModelProfile, hardware: Hardware) -> Prediction | None:
    """`HostOffloadStrategy`: one layer at a time is on the device (arXiv 2002.05645); `None` where that is the host.

    Args:
        profile: of the model.
        hardware: what it runs on.
    """
    device = hardware.device(1)
    if not device.host_link or not profile.layers:
        return None
    sample = profile.at(profile.rows)
    # The layer that is computed, its gradient, and the one that is fetched ahead.
    largest = 3 * max(layer.parameters for layer in profile.layers)
    kept = max((block.kept + block.inputs for block in sample.blocks), default=sample.peak)
    compute = sample.compute.seconds(device) * 4 / 3 + hardware.step
    # Weights come twice, gradients go once. The host updates, with memory that is taken to be as fast as the link.
    moved = 3 * profile.trainable
    update = sample.update.bytes / device.host_link + sample.update.operations * device.operation
    seconds = max(compute, moved / device.host_link) + update
    return Prediction(
        "HostOffload",
        "HostOffloadStrategy",
        {},
        IN_ONE_PROCESS,
        1,
        seconds,
        compute,
        seconds - compute,
        largest + sample.batch + kept + device.reserved,
        device.memory,
        profile.trainable,
    )
