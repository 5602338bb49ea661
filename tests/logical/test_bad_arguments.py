"""What is no argument of a strategy or a callback is refused in words: what was received, what was expected."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import tfdist

DEVICES = ["CPU:0", "CPU:1"]


@pytest.mark.usefixtures("mirrored")  # it makes the devices
@pytest.mark.parametrize(
    ("make", "received", "expected"),
    [
        (lambda: tfdist.PipelineStrategy(DEVICES, num_microbatches=True), "num_microbatches=True", "a whole number"),
        (lambda: tfdist.PipelineStrategy(DEVICES, replicas=True), "replicas=True", "a whole number"),
        (
            lambda: tfdist.PipelineStrategy(DEVICES, schedule="interleaved", chunks_per_device=2.0),
            "chunks_per_device=2.0",
            "a whole number",
        ),
        (lambda: tfdist.PipelineStrategy(2), "devices=2", "a list with a device for each stage"),
        (lambda: tfdist.MirroredStrategy(2), "devices=2", "a list of devices"),
        (lambda: tfdist.MirroredStrategy("CPU:0"), "devices='CPU:0'", "a list of devices"),
        (lambda: tfdist.MirroredStrategy([]), "devices=[]", "a list of devices"),
        (
            lambda: tfdist.MirroredStrategy(["CPU:0", "/cpu:0"]),
            "devices=['CPU:0', '/cpu:0']",
            "a list of devices, each once",
        ),
        (lambda: tfdist.MultiWorkerMirroredStrategy(2), "cluster_resolver=2", "a tf.distribute.cluster_resolver"),
        (lambda: tfdist.MultiWorkerMirroredStrategy(DEVICES), "cluster_resolver=", "a tf.distribute.cluster_resolver"),
        (lambda: tfdist.MultiWorkerMirroredStrategy(cluster=3), "cluster=3", "a tfdist.ClusterConfig"),
        (lambda: tfdist.MultiWorkerMirroredStrategy(start_timeout="9"), "start_timeout='9'", "a positive number"),
        (lambda: tfdist.HorovodStrategy(2), "cluster_resolver=2", "a tf.distribute.cluster_resolver"),
        (lambda: tfdist.ParameterServerStrategy(2), "cluster_resolver=2", "a tf.distribute.cluster_resolver"),
        (lambda: tfdist.ParameterServerStrategy(cluster=2), "cluster=2", "a tfdist.ClusterConfig"),
        (lambda: tfdist.PipelineStrategy(cluster=2), "cluster=2", "a tfdist.ClusterConfig"),
        (lambda: tfdist.ParameterServerStrategy(start_timeout=-1), "start_timeout=-1", "a positive number"),
        (lambda: tfdist.callbacks.BackupAndRestore(3), "backup_dir=3", "the path of a folder"),
        (lambda: tfdist.callbacks.TensorBoard(3), "log_dir=3", "the path of a folder"),
    ],
)
def test_refusals(make: Callable, received: str, expected: str):
    with pytest.raises(ValueError) as refused:
        make()
    assert str(refused.value).startswith(f"Received: {received}")
    assert f"Expected: {expected}" in str(refused.value)
