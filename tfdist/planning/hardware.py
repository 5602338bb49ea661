"""What a training runs on: devices, and the links between them. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Device:
    """What computes: a GPU, or the cores of one process.

    Attributes:
        flops: floating-point operations a second, of large matrix products and convolutions.
        bandwidth: bytes a second that elementwise operations read and write.
        operation: seconds that starting an operation takes.
        memory: bytes that it has.
        reserved: bytes that TensorFlow itself takes of that.
        host_link: bytes a second from or to the host's memory; 0 where the device is the host.

    Example:
        >>> Device(flops=1e11, bandwidth=4e10, operation=1.5e-6, memory=8 * 10**9).scaled(0.5).flops
        50000000000.0
    """

    flops: float
    bandwidth: float
    operation: float
    memory: int
    reserved: int = 0
    host_link: float = 0.0

    def scaled(self, share: float) -> Device:
        """A device that is a share of this one, such as some of its cores."""
        return dataclasses.replace(
            self, flops=self.flops * share, bandwidth=self.bandwidth * share, memory=int(self.memory * share)
        )


@dataclasses.dataclass(frozen=True)
class Link:
    """What connects devices.

    Attributes:
        latency: seconds until a message without content is there.
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
        name: for people.
        kind: "CPU" or "GPU".
        devices: what one device is, by how many are at work on its host: processes share cores, caches and memory.
        per_host: how many devices a host has.
        inside: between devices of a host.
        between: between hosts; all devices of a host share it.
        step: seconds that Keras needs for a step besides, in one process.
        cluster_step: the same in each of several processes.
        horovod: `inside`, by Horovod; `None` where it was not measured.

    Raises:
        ValueError: for a kind that there is not, or numbers that are not positive.

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
    horovod: Link | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("CPU", "GPU"):
            raise ValueError(f"Received: kind={self.kind!r}. Expected: 'CPU' or 'GPU'.")
        if 1 not in self.devices or self.per_host < 1:
            raise ValueError(
                f"Received: per_host={self.per_host!r} and devices for {sorted(self.devices)} at work. Expected: at "
                "least one device on a host, and what it is when it works alone (devices={1: Device(...)})."
            )
        for device in self.devices.values():
            positive = (device.flops, device.bandwidth, device.memory)
            others = (device.operation, device.reserved, device.host_link)
            # What is no number is not larger than anything.
            if not (all(value > 0 for value in positive) and all(value >= 0 for value in others)):
                raise ValueError(
                    f"Received: {device}. Expected: positive flops, bandwidth and memory, and no negative numbers."
                )
        for link in (self.inside, self.between, self.horovod):
            if link is not None and not (link.bandwidth > 0 and link.latency >= 0):
                raise ValueError(f"Received: {link}. Expected: a positive bandwidth, and no negative latency.")

    def device(self, count: int) -> Device:
        """One of `count` devices that work together."""
        here = min(count, self.per_host)
        known = max(number for number in self.devices if number <= here)
        device = self.devices[known]
        return device if self.kind == "GPU" else device.scaled(known / here)

    def link(self, count: int, horovod: bool = False) -> Link:
        """The slowest link between `count` devices. A ring passes each border between hosts once."""
        inside = self.horovod if horovod and self.horovod is not None else self.inside
        if count <= self.per_host:
            return inside
        slowest = min(inside.bandwidth, self.between.bandwidth)
        return Link(max(inside.latency, self.between.latency), slowest)

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
            for name in ("inside", "between", "horovod"):
                if fields.get(name) is not None:
                    fields[name] = Link(**fields[name])
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise _unreadable(error) from None
        try:
            return cls(**fields)
        except TypeError as error:
            raise _unreadable(error) from None


def _unreadable(error: Exception) -> ValueError:
    return ValueError(
        f"Received: a description of hardware that cannot be read ({error!r}). Expected: JSON with the fields of "
        "tfdist.planning.Hardware, as `tfdist plan --calibrate --save FILE` writes it."
    )
