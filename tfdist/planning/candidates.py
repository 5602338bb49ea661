"""All strategies that could train a model. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tfdist.planning.hardware import Hardware
from tfdist.planning.offload import offloaded
from tfdist.planning.pipelines import pipelines
from tfdist.planning.prediction import Prediction
from tfdist.planning.profile import ModelProfile
from tfdist.planning.replicas import replicated
from tfdist.planning.servers import parameter_servers


def candidates(profile: ModelProfile, hardware: Hardware, devices: Sequence[int]) -> list[Prediction]:
    """Predictions for one device, and for each number of devices, from simple to complicated.

    Args:
        profile: of the model.
        hardware: what it runs on.
        devices: how many may be used.
    """
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
