"""The environments that a cluster can be found in, one file each.

A new one is a module with `NAME`, `detect(env) -> bool` and `read(env)`, and a line below. `read` returns a
`ClusterConfig` where the system tells every address, otherwise a `Membership`, which the rendezvous completes.
The first whose `detect` is true is read: what a person has set, then what is closest to the process. mpirun and
torchrun are started inside of Slurm's steps and Kubernetes' pods, so they come before these.
"""

from __future__ import annotations

from tfdist.cluster.environments import (
    allocation,
    horovodrun,
    kubernetes,
    launcher,
    lsf,
    mvapich,
    open_mpi,
    own,
    pmi,
    rank_variables,
    sagemaker,
    single_process,
    slurm,
    tf_config,
    torchrun,
    vertex_ai,
)

ENVIRONMENTS = (
    launcher,
    own,
    tf_config,
    vertex_ai,
    torchrun,
    horovodrun,
    open_mpi,
    mvapich,
    pmi,
    lsf,
    slurm,
    sagemaker,
    kubernetes,
    rank_variables,
    allocation,
    single_process,
)
