"""Which GPUs a process of several names, and how they exchange; on a host without any, by what TensorFlow would say."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensorflow as tf

from tfdist.cluster import gpus
from tfdist.cluster.config import ClusterConfig
from tfdist.runtime import job
from tfdist.strategies import multi_worker
from tfdist.strategies.multi_worker import MultiWorkerExtended, _exchange_of, _options_for_devices, resolver_of

PHYSICAL = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(8)]
CLUSTER = ClusterConfig({"worker": ["a:1", "b:1"]}, "worker", 1)


@pytest.fixture
def one_of_eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that sees one of its host's eight GPUs, in two logical parts; the first task's are known as well."""
    config = multi_worker.tf.config
    monkeypatch.setattr(config, "list_physical_devices", lambda kind=None: PHYSICAL)
    monkeypatch.setattr(config, "get_visible_devices", lambda kind=None: PHYSICAL[3:4])
    names = [f"/job:worker/replica:0/task:{task}/device:GPU:{i}" for task, i in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    monkeypatch.setattr(config, "list_logical_devices", lambda kind: [tf.config.LogicalDevice(n, kind) for n in names])


def test_devices_are_those_that_the_process_sees(one_of_eight: None) -> None:
    resolver = resolver_of(CLUSTER)
    assert resolver.num_accelerators() == {"GPU": 1}
    extended = object.__new__(MultiWorkerExtended)
    devices, kind = extended._initialize_local_devices(resolver, "/job:worker/task:1")
    assert kind == "GPU"
    assert devices == ("/job:worker/task:1/device:GPU:0", "/job:worker/task:1/device:GPU:1")


def test_gpus_exchange_by_nccl_unless_they_share_one(request: pytest.FixtureRequest) -> None:
    kinds = tf.distribute.experimental.CommunicationImplementation
    assert _options_for_devices(shares_gpus=False).implementation == kinds.AUTO  # CPUs
    request.getfixturevalue("one_of_eight")
    assert _options_for_devices(shares_gpus=False).implementation == kinds.NCCL
    assert _options_for_devices(shares_gpus=True).implementation == kinds.AUTO


class _Job:
    """A job whose processes can connect."""

    def __init__(self, shares_gpus: bool) -> None:
        self.shares_gpus = shares_gpus

    def exchange(self, seconds: float) -> str:
        return "an exchange"


def test_only_gpus_that_are_shared_have_a_direct_transport() -> None:
    devices = ["/job:worker/task:1/device:GPU:0"]
    assert _exchange_of(_Job(shares_gpus=False), devices, "auto", 1.0) is None
    with pytest.raises(
        ValueError, match=r"Received: transport='direct' with .*GPU:0\. Expected: CPUs, or GPUs that processes"
    ):
        _exchange_of(_Job(shares_gpus=False), devices, "direct", 1.0)
    assert _exchange_of(_Job(shares_gpus=True), devices, "auto", 1.0) == "an exchange"
    assert _exchange_of(_Job(shares_gpus=True), devices, "tensorflow", 1.0) is None


def test_each_logical_device_names_its_gpu(one_of_eight: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing = "\n".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i}{i})" for i in range(8))
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\necho '{listing}'\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    halves = [tf.config.LogicalDeviceConfiguration(memory_limit=1024)] * 2
    monkeypatch.setattr(job.tf.config, "get_logical_device_configuration", lambda device: halves)
    assert job.own_gpus() == ["GPU-33", "GPU-33"]
    # CUDA calls the fourth of these GPU 3.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,GPU-4")
    assert job.own_gpus() == ["GPU-44", "GPU-44"]
    # Of unknown ones, those of a process are told apart, and none is another process'.
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert len(set(job.own_gpus())) == 1 and str(os.getpid()) in job.own_gpus()[0]


def test_slices_have_the_name_of_their_gpu() -> None:
    """NCCL connects no two slices of a GPU."""
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n"
        "  MIG 3g.71gb     Device  0: (UUID: MIG-11)\n"
        "  MIG 3g.71gb     Device  1: (UUID: MIG-22)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-bb)\n"
    )
    names = ["0", "1", "MIG-22", "MIG-2", "GPU-b", "2", "GPU-c"]
    found = [gpus.parse_unique_name(listing, name) for name in names]
    assert found == ["GPU-aa", "GPU-bb", "GPU-aa", "GPU-aa", "GPU-bb", "", ""]


def test_unknown_transport() -> None:
    with pytest.raises(ValueError, match=r"Received: transport='mpi'\. Expected one of 'auto', 'tensorflow', 'direct'"):
        multi_worker.MultiWorkerMirroredStrategy(transport="mpi")
