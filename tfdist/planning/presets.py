"""Hardware by its data sheets, for plans of what is not at hand.

Of what a data sheet promises, trainings in single precision get about half of the arithmetic and three quarters of the
bandwidths; that is what stands here.
"""

from __future__ import annotations

from tfdist.planning.hardware import Device, Hardware, Link

_ARITHMETIC, _BANDWIDTH = 0.5, 0.75
_OPERATION = 5e-6
_GBIT = 1e9 / 8


def _device(teraflops: float, gigabytes_a_second: float, gigabytes: float, host: float) -> Device:
    memory = int(gigabytes * 1e9)
    return Device(
        teraflops * 1e12 * _ARITHMETIC,
        gigabytes_a_second * 1e9 * _BANDWIDTH,
        _OPERATION,
        memory,
        memory // 20,
        host * 1e9 * _BANDWIDTH,
    )


def _hosts(name: str, device: Device, per_host: int, inside: float, network: float) -> Hardware:
    """Links in GB/s in a host, and in Gbit/s between hosts, whose network interfaces write into memory themselves."""
    links = Link(5e-6, inside * 1e9 * _BANDWIDTH), Link(1e-5, network * _GBIT * _BANDWIDTH)
    return Hardware(name, "GPU", {1: device}, per_host, *links)


PRESETS = {
    # NVIDIA Tesla P100 PCIe: 9.3 TFLOP/s, 732 GB/s; the hosts of Horovod's published figures (arXiv 1802.05799).
    "p100-25gbe": _hosts("hosts of 4 P100, 25 Gbit/s", _device(9.3, 732, 16, 12), 4, 12, 25),
    # NVIDIA Tesla P40: 12 TFLOP/s, 346 GB/s; those of torchgpipe (arXiv 2004.09910).
    "p40-pcie": _hosts("hosts of 8 P40", _device(12, 346, 24, 12), 8, 12, 10),
    # NVIDIA V100 SXM2: 15.7 TFLOP/s, 900 GB/s, NVLink 150 GB/s each way.
    "v100-nvlink": _hosts("hosts of 8 V100, NVLink, 100 Gbit/s", _device(15.7, 900, 16, 12), 8, 150, 100),
    # NVIDIA A100 SXM4 80 GB: 19.5 TFLOP/s without tensor cores, 2039 GB/s, NVLink 300 GB/s each way, PCIe 4.
    "a100-nvlink": _hosts("hosts of 8 A100, NVLink, 200 Gbit/s", _device(19.5, 2039, 80, 25), 8, 300, 200),
    # NVIDIA H100 SXM5: 67 TFLOP/s without tensor cores, 3350 GB/s, NVLink 450 GB/s each way, PCIe 5.
    "h100-nvlink": _hosts("hosts of 8 H100, NVLink, 400 Gbit/s", _device(67, 3350, 80, 50), 8, 450, 400),
}
