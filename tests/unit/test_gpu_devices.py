"""Which GPUs a process of several names, and how they exchange; on a host without any, by what TensorFlow would say."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.strategies import multi_worker
from tfdist.strategies.multi_worker import _exchange_of, _MultiWorkerExtended, _options_for_devices, resolver_of

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
    extended = object.__new__(_MultiWorkerExtended)
    devices, kind = extended._initialize_local_devices(resolver, "/job:worker/task:1")
    assert kind == "GPU"
    assert devices == ("/job:worker/task:1/device:GPU:0", "/job:worker/task:1/device:GPU:1")


def test_gpus_exchange_by_nccl(one_of_eight: None) -> None:
    assert _options_for_devices().implementation == tf.distribute.experimental.CommunicationImplementation.NCCL


def test_cpus_do_not() -> None:
    assert _options_for_devices().implementation == tf.distribute.experimental.CommunicationImplementation.AUTO


def test_gpus_have_no_direct_transport() -> None:
    devices = ["/job:worker/task:1/device:GPU:0"]
    assert _exchange_of(None, devices, "auto", 1.0) is None
    with pytest.raises(
        ValueError, match=r"Received: transport='direct' with .*GPU:0\. Expected: CPUs; GPUs exchange by"
    ):
        _exchange_of(None, devices, "direct", 1.0)


def test_unknown_transport() -> None:
    with pytest.raises(ValueError, match=r"Received: transport='mpi'\. Expected one of 'auto', 'tensorflow', 'direct'"):
        multi_worker.MultiWorkerMirroredStrategy(transport="mpi")
