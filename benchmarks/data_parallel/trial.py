"""One trial from its workload to its samples: how the processes of each framework are started."""

from __future__ import annotations

from benchmarks.children import Children, tensorflow_places, torch_places
from benchmarks.data_parallel.peers import PEERS, Trial
from tfdist.cluster.ports import reserve


def run(trial: Trial, children: Children) -> dict:
    """Runs a trial and returns what its rank 0 does: "samples_ms", "loss", "accuracy" and "cores".

    Raises:
        TrialError: if it fails or takes too long.
        ClusterError: if there are no free ports.
    """
    module, workload = f"{__package__}.{PEERS[trial.peer].worker}", trial.workload
    settings = {"workload": vars(workload)}
    if workload.processes == 1:
        return children.python(module, settings, children.cores[:1])
    if trial.peer == "tfdist":
        return children.workers(module, settings, {}, options=("--transport", workload.transport))
    with reserve(workload.processes) as ports:
        places = tensorflow_places if trial.peer == "tf_keras" else torch_places
        return children.side_by_side(module, settings, places([f"127.0.0.1:{port}" for port in ports.ports]))
