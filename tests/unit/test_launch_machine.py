from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfdist.cluster.gpus import parse_nvidia_smi, parse_visible_devices, visible_gpus
from tfdist.launcher.machine import Machine


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("0, 2", ("0", "2")),
        ("1,-1,2", ("1",)),
        ("GPU-8932,GPU-1", ("GPU-8932", "GPU-1")),
    ],
)
def test_visible_devices(text: str, expected: tuple[str, ...]) -> None:
    assert parse_visible_devices(text) == expected
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text, "PATH": "/nowhere"}) == expected


def test_nvidia_smi_listing() -> None:
    listing = "GPU 0: NVIDIA H200 (UUID: GPU-aa)\nGPU 1: NVIDIA H200 (UUID: GPU-bb)\n"
    assert parse_nvidia_smi(listing) == ("0", "1")


def test_slices_take_the_place_of_their_gpu() -> None:
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n"
        "  MIG 3g.71gb     Device  0: (UUID: MIG-11)\n"
        "  MIG 3g.71gb     Device  1: (UUID: MIG-22)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-bb)\n"
    )
    assert parse_nvidia_smi(listing) == ("MIG-11", "MIG-22", "1")


def test_nvidia_smi_is_asked(tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: Some (UUID: GPU-x)"\n')
    command.chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) == ("0",)


def test_failing_nvidia_smi_means_no_gpu(tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\necho "GPU 0: Some (UUID: GPU-x)"\nexit 9\n')
    command.chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) == ()
    assert visible_gpus({"PATH": "/nowhere"}) == ()


def test_cores_are_those_of_the_affinity_mask() -> None:
    assert Machine.this_one({"PATH": "/nowhere"}).cores == tuple(sorted(os.sched_getaffinity(0)))
