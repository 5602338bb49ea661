"""Predictions for parameter servers. Pure."""

from __future__ import annotations

from tfdist.memory.estimation.liveness import MARGIN
from tfdist.planning.hardware import Hardware
from tfdist.planning.prediction import Prediction
from tfdist.planning.profile import ModelProfile
from tfdist.planning.starting import start_of

_WORKERS_PER_SERVER = 4


def parameter_servers(profile: ModelProfile, hardware: Hardware, workers: int) -> Prediction:
    """Workers that take batches at their own pace, and fetch and send all weights for each.

    Args:
        profile: of the model.
        hardware: what it runs on.
        workers: how many compute.
    """
    servers = -(-workers // _WORKERS_PER_SERVER)
    device, link = hardware.device(workers), hardware.link(workers)
    # A batch of the whole size for each worker; `workers` of them are on their way at a time.
    sample = profile.at(profile.rows)
    compute = sample.compute.seconds(device) + hardware.cluster_step
    there_and_back = 2 * link.seconds(profile.trainable)
    # Each worker can be as fast as that, and all together no faster than the servers' links.
    seconds = max((compute + there_and_back) / workers, 2 * profile.trainable / (servers * link.bandwidth))
    # The chief hands out every step, which takes about as long as Keras needs for one.
    seconds = max(seconds, sample.update.seconds(device) / servers, hardware.step)
    memory = 2 * profile.weights + sample.batch + MARGIN * sample.peak + device.reserved
    return Prediction(
        "ParameterServer",
        "ParameterServerStrategy",
        {},
        start_of(hardware, workers, f"-n {workers} --ps {servers}"),
        workers,
        seconds,
        compute / workers,
        max(seconds - compute / workers, 0.0),
        memory,
        device.memory,
        profile.trainable,
        is_exact=False,
    )
