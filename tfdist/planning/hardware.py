"""What a training runs on: devices, the links between them and how long sums over them take; presets. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Data sheets promise more than trainings in single precision get: about half of the arithmetic and three quarters of
# the bandwidths.
_ARITHMETIC, _BANDWIDTH = 0.5, 0.75
_OPERATION = 5e-6
_GBIT = 1e9 / 8


@dataclasses.dataclass(frozen=True)
class Device:
    """What computes: a GPU, or the cores of one process.

    Attributes:
        flops: floating-point operations a second, of large matrix products and convolutions.
        bandwidth: bytes a second that elementwise operations read and write.
        operation: seconds that starting an operation takes.
        memory: bytes that it has.
        reserved: bytes that TensorFlow itself takes of that.
    """

    flops: float
    bandwidth: float
    operation: float
    memory: int
    reserved: int = 0


@dataclasses.dataclass(frozen=True)
class Link:
    """A connection between devices.

    Attributes:
        latency: seconds that an empty message takes.
        bandwidth: bytes a second in each direction.

    Example:
        >>> Link(latency=1e-5, bandwidth=1e9).seconds(10**6)
        0.00101
    """

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """How long a message of `size` bytes takes."""
        return self.latency + size / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Hosts with devices.

    Attributes:
        name: a description.
        kind: "CPU" or "GPU".
        devices: one device, by how many are at work on its host: processes share cores, caches and memory.
        per_host: how many devices a host has.
        inside: between devices of a host.
        between: between hosts; all devices of a host share it.
        step: seconds that Keras itself adds to a step, in one process.
        cluster_step: the same in each of several processes.

    Raises:
        ValueError: for an unknown kind, or without a device.

    Example:
        >>> card = Device(flops=1e13, bandwidth=5e11, operation=5e-6, memory=16 * 10**9)
        >>> hardware = Hardware("two cards", "GPU", {1: card}, 2, Link(1e-5, 1e10), Link(5e-5, 1e9))
        >>> hardware.device(2) == card, hardware.link(2).bandwidth, hardware.link(4).bandwidth
        (True, 10000000000.0, 1000000000.0)
    """

    name: str
    kind: str
    devices: Mapping[int, Device]
    per_host: int
    inside: Link
    between: Link
    step: float = 1e-3
    cluster_step: float = 2e-3

    def __post_init__(self) -> None:
        if self.kind not in ("CPU", "GPU"):
            raise ValueError(f"Received: kind={self.kind!r}. Expected: 'CPU' or 'GPU'.")
        if 1 not in self.devices or self.per_host < 1:
            raise ValueError(
                f"Received: per_host={self.per_host!r} and devices for {sorted(self.devices)} at work. Expected: at "
                "least one device on a host, and what it is when it works alone (devices={1: Device(...)})."
            )

    def device(self, count: int) -> Device:
        """One of `count` devices that work together."""
        here = min(count, self.per_host)
        known = max(number for number in self.devices if number <= here)
        device = self.devices[known]
        if self.kind == "GPU":
            return device
        share = known / here
        scaled = {"flops": device.flops * share, "bandwidth": device.bandwidth * share}
        return dataclasses.replace(device, memory=int(device.memory * share), **scaled)

    def link(self, count: int) -> Link:
        """The slowest link between `count` devices. A ring passes each border between hosts once."""
        if count <= self.per_host:
            return self.inside
        slowest = min(self.inside.bandwidth, self.between.bandwidth)
        return Link(max(self.inside.latency, self.between.latency), slowest)

    def to_json(self) -> str:
        """As text, for a file."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Hardware:
        """The opposite of `to_json`.

        Raises:
            ValueError: if this is no such text.
        """
        try:
            fields: dict[str, Any] = json.loads(text)
            fields["devices"] = {int(count): Device(**device) for count, device in fields["devices"].items()}
            links = {name: Link(**fields.pop(name)) for name in ("inside", "between")}
            return cls(**fields, **links)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(
                f"Received: a description of hardware that cannot be read ({error}). Expected: JSON with the fields of "
                "tfdist.planning.Hardware, as `tfdist plan --calibrate --save FILE` writes it."
            ) from None


def ring_bytes(size: float, devices: int) -> float:
    """Bytes that each device sends in a ring all-reduce of `size` bytes: 2 (N - 1) / N of it (arXiv 1802.05799).

    Example:
        >>> ring_bytes(100, 2), ring_bytes(100, 4), ring_bytes(100, 1)
        (100.0, 150.0, 0.0)
    """
    return 2 * (devices - 1) / devices * size


def all_reduce_seconds(size: float, devices: int, link: Link) -> float:
    """How long a ring all-reduce takes: 2 (N - 1) messages one after the other.

    Example:
        >>> round(all_reduce_seconds(1e9, 4, Link(latency=1e-3, bandwidth=1e9)), 6)
        1.506
    """
    return 2 * (devices - 1) * link.latency + ring_bytes(size, devices) / link.bandwidth


def _device(teraflops: float, gigabytes_a_second: float, gigabytes: float) -> Device:
    memory = int(gigabytes * 1e9)
    return Device(
        teraflops * 1e12 * _ARITHMETIC,
        gigabytes_a_second * 1e9 * _BANDWIDTH,
        _OPERATION,
        memory,
        memory // 20,
    )


def _hosts(name: str, device: Device, per_host: int, inside: float, network: float) -> Hardware:
    """Links are in GB/s inside of a host and in Gbit/s between hosts; network cards access memory themselves."""
    links = Link(5e-6, inside * 1e9 * _BANDWIDTH), Link(1e-5, network * _GBIT * _BANDWIDTH)
    return Hardware(name, "GPU", {1: device}, per_host, *links)


# From data sheets, for plans of hardware that is not at hand.
PRESETS = {
    # NVIDIA Tesla P100 PCIe: 9.3 TFLOP/s, 732 GB/s; the hosts of Horovod's published figures (arXiv 1802.05799).
    "p100-25gbe": _hosts("hosts of 4 P100, 25 Gbit/s", _device(9.3, 732, 16), 4, 12, 25),
    # NVIDIA Tesla P40: 12 TFLOP/s, 346 GB/s; those of torchgpipe (arXiv 2004.09910).
    "p40-pcie": _hosts("hosts of 8 P40", _device(12, 346, 24), 8, 12, 10),
    # NVIDIA V100 SXM2: 15.7 TFLOP/s, 900 GB/s, NVLink 150 GB/s each way.
    "v100-nvlink": _hosts("hosts of 8 V100, NVLink, 100 Gbit/s", _device(15.7, 900, 16), 8, 150, 100),
    # NVIDIA A100 SXM4 80 GB: 19.5 TFLOP/s without tensor cores, 2039 GB/s, NVLink 300 GB/s each way.
    "a100-nvlink": _hosts("hosts of 8 A100, NVLink, 200 Gbit/s", _device(19.5, 2039, 80), 8, 300, 200),
    # NVIDIA H100 SXM5: 67 TFLOP/s without tensor cores, 3350 GB/s, NVLink 450 GB/s each way.
    "h100-nvlink": _hosts("hosts of 8 H100, NVLink, 400 Gbit/s", _device(67, 3350, 80), 8, 450, 400),
}


def hardware_of(hardware: Hardware | str) -> Hardware:
    """What has this name, or is described in this file; a `Hardware` is returned as it is.

    Raises:
        ValueError: there is neither, or the file has no hardware in it.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if hardware in PRESETS:
        return PRESETS[hardware]
    try:
        return Hardware.from_json(Path(hardware).read_text())
    except OSError:
        raise ValueError(
            f"Received: hardware {hardware!r}. Expected: one of {', '.join(PRESETS)}, a file that "
            "`tfdist plan --save FILE` has written, or a tfdist.planning.Hardware."
        ) from None
