"""Predictions for strategies whose devices all hold the model. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from tfdist.memory.estimation.assignment import Option, peak
from tfdist.memory.estimation.block_costs import options
from tfdist.memory.estimation.liveness import MARGIN
from tfdist.memory.estimation.rates import Rates
from tfdist.planning.communication import all_reduce_seconds, ring_bytes
from tfdist.planning.hardware import Device, Hardware
from tfdist.planning.prediction import Prediction
from tfdist.planning.profile import ModelProfile, Sample, StepCost
from tfdist.planning.starting import IN_ONE_PROCESS, gpus, start_of

MODES = ("none", "recompute", "park", "swap")


def replicated(profile: ModelProfile, hardware: Hardware, devices: int) -> Iterator[Prediction]:
    """One device, or one of the strategies with a replica on each, with every memory mode.

    Args:
        profile: of the model.
        hardware: what it runs on.
        devices: how many take part.
    """
    modes = [mode for mode in MODES if mode in ("none", "recompute") or hardware.device(devices).host_link]
    for mode in modes:
        if devices == 1:
            yield _replica(profile, hardware, 1, mode, "one device", "" if mode == "none" else "MirroredStrategy")
        elif hardware.kind == "GPU" and devices <= hardware.per_host:
            yield _replica(profile, hardware, devices, mode, "Mirrored", "MirroredStrategy", in_one_process=True)
        if devices > 1:
            yield _replica(profile, hardware, devices, mode, "MultiWorker", "MultiWorkerMirroredStrategy")
            if hardware.horovod is not None:
                yield _replica(profile, hardware, devices, mode, "Horovod", "HorovodStrategy", horovod=True)
    if devices > 1 and profile.slots > 0:
        yield _replica(profile, hardware, devices, "none", "MultiWorker, ZeRO-1", "MultiWorkerMirroredStrategy", True)


def _replica(
    profile: ModelProfile,
    hardware: Hardware,
    devices: int,
    mode: str,
    name: str,
    strategy: str,
    sharded: bool = False,
    horovod: bool = False,
    in_one_process: bool = False,
) -> Prediction:
    device, link = hardware.device(devices), hardware.link(devices, horovod)
    # The largest part that a replica gets decides.
    sample = profile.at(-(-profile.rows // devices))
    shards = devices if sharded else 1
    chosen, added = in_mode(sample, device, mode)
    alone = devices == 1 or in_one_process
    update = _sharded(sample.update, shards, profile.trainable) if sharded else sample.update
    compute = sample.compute.seconds(device) + update.seconds(device) + added
    compute += hardware.step if alone else hardware.cluster_step
    communication = 0.0
    if devices > 1:
        # Of sharded optimizers, the parts of the weights come together by another sum.
        sums = 2 if sharded else 1
        communication = sums * all_reduce_seconds(profile.trainable, devices, link)
        # Statistics travel forward, and their gradients back.
        communication += 2 * profile.normalizations * all_reduce_seconds(0, devices, link)
    # Gradients are packed into one tensor to be sent.
    packed = profile.trainable if devices > 1 else 0
    memory = profile.weights + profile.slots / shards + sample.batch + MARGIN * chosen + packed + device.reserved
    arguments = {**(gpus(hardware, devices) if alone else {}), **({} if mode == "none" else {"memory": mode})}
    how = f"--backend horovod -n {devices}" if horovod else ""
    start = IN_ONE_PROCESS if alone else start_of(hardware, devices, how, by_mpi=horovod)
    sent = (2 if sharded else 1) * ring_bytes(profile.trainable, devices)
    label = name if mode == "none" else f"{name}, {mode}"
    seconds = compute + communication
    return Prediction(
        label,
        strategy,
        arguments,
        start,
        devices,
        seconds,
        compute,
        communication,
        memory,
        device.memory,
        sent,
        is_sharded=sharded,
        mode=mode,
    )


def _sharded(update: StepCost, shards: int, trainable: float) -> StepCost:
    """Each replica updates its part; gradients and weights are packed and unpacked, read and written once each time."""
    return StepCost(update.flops / shards, update.bytes / shards + 4 * trainable, update.operations)


def in_mode(sample: Sample, device: Device, mode: str) -> tuple[float, float]:
    """Bytes of what a step makes at its peak if all blocks have this mode, and the seconds that it adds."""
    if mode == "none" or not sample.blocks:
        return sample.peak, 0.0
    # Without a link there is no host to send anything to.
    rates = Rates(device.flops, device.host_link or 1.0)
    every = options(sample.blocks, rates, with_host=bool(device.host_link))
    plain = [of_block[0] for of_block in every]
    chosen = [next((o for o in of_block if o.mode == mode), of_block[0]) for of_block in every]
    beside = max(sample.peak - peak(plain), 0.0)
    return beside + peak(chosen), _added(chosen, sample, device)


def _added(chosen: list[Option], sample: Sample, device: Device) -> float:
    """Blocks are rated by their operations alone; a forward pass is a third of what the step takes."""
    by_flops = sum(block.flops for block in sample.blocks) / device.flops
    forward = sample.compute.seconds(device) / 3
    return sum(option.seconds for option in chosen) * (forward / by_flops if by_flops else 1.0)
