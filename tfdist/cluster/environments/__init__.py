"""The systems that a cluster can be found by, in the order in which they are asked.

Each has a name, `detect(env)` and `read(env)`. `read` returns a `ClusterConfig` where the system gives every address,
otherwise a `Membership`, which the rendezvous completes. A launcher that sets rank and size in variables is a row in
`launchers`; a system that needs code of its own is a module.

The first whose `detect` is true is read: what a person has set, then what is closest to the process. mpirun and
torchrun are started inside of Slurm's steps and Kubernetes' pods, so they come before these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.environments import json_variables, kubernetes, launchers, single_process, slurm
from tfdist.cluster.membership import Membership
from tfdist.cluster.variables import text


class Environment(NamedTuple):
    """A system that needs code of its own.

    Attributes:
        name: For messages.
        detect: Whether it has started this process, by the environment variables.
        read: What it says about the cluster.
    """

    name: str
    detect: Callable[[Mapping[str, str]], bool]
    read: Callable[[Mapping[str, str]], ClusterConfig | Membership]


def _set(*names: str) -> Callable[[Mapping[str, str]], bool]:
    """Whether all of these variables have a value; a blank one counts as not set."""
    return lambda env: all(text(env, name) for name in names)


TF_CONFIG = Environment("TF_CONFIG", _set("TF_CONFIG"), json_variables.read_tf_config)
SLURM = Environment(slurm.NAME, slurm.detect, slurm.read)

ENVIRONMENTS: tuple[Environment | launchers.Launcher, ...] = (
    Environment("TFDIST_CLUSTER", _set("TFDIST_CLUSTER"), json_variables.read_tfdist_cluster),
    launchers.BY_HAND,
    TF_CONFIG,
    Environment("Vertex AI", _set("CLUSTER_SPEC", "CLOUD_ML_PROJECT_ID"), json_variables.read_cluster_spec),
    launchers.TORCHRUN,
    launchers.HOROVODRUN,
    *launchers.MPI,
    launchers.JSRUN,
    SLURM,
    Environment("SageMaker", _set("SM_HOSTS", "SM_CURRENT_HOST"), json_variables.read_sagemaker),
    launchers.KUBEFLOW_TRAINER,
    Environment(kubernetes.NAME, kubernetes.detect, kubernetes.read),
    launchers.RANK_VARIABLES,
    Environment("allocation", single_process.is_allocated, single_process.read),
    Environment(single_process.NAME, lambda env: True, single_process.read),
)

# What starts processes by rank; other systems set TF_CONFIG themselves.
RANK_LAUNCHERS = (*launchers.MPI, SLURM)
