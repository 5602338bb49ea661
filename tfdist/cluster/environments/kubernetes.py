"""Kubernetes: Indexed Jobs, JobSets and StatefulSets, with a headless Service by which pods find each other.

None of them tells a pod how many pods there are: the manifest has to, as TFDIST_SIZE (`tfdist submit` writes it). The
host of rank 0 follows from the own host name, which ends with the own index:

Indexed Job    job-3.service.namespace.svc.cluster.local       rank: JOB_COMPLETION_INDEX
JobSet         set-workers-0-3.set.namespace.svc...            rank: JOB_COMPLETION_INDEX, in the jobs of one replica
StatefulSet    name-3.service.namespace.svc...                 rank: the number that the name ends with

References:
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.variables import number, text

NAME = "Kubernetes"
_INDEX, _SIZE = "JOB_COMPLETION_INDEX", "TFDIST_SIZE"
_ORDINAL = re.compile(r"-(\d+)$")


def detect(env: Mapping[str, str]) -> bool:
    """Whether this is a pod of an Indexed Job or a JobSet, or a pod with a number that knows how many there are."""
    if "KUBERNETES_SERVICE_HOST" not in env:
        return False
    return _INDEX in env or (_SIZE in env and _ORDINAL.search(pod_name(env)) is not None)


def read(env: Mapping[str, str]) -> Membership:
    """Rank, size, and the host name of rank 0.

    Raises:
        ClusterError: if the manifest does not tell the size.

    Example:
        >>> env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3", "TFDIST_SIZE": "4"}
        >>> read(env | {"HOSTNAME": "train-3", "TFDIST_HOST": "train-3.train"}).host
        'train-0.train'
    """
    if not text(env, _SIZE):
        raise ClusterError(
            f"{NAME}: received the pod {pod_name(env)}, one of several, without the number of pods, which Kubernetes "
            f'does not tell. Expected: the environment variable {_SIZE} with the value of "completions" (Indexed Job) '
            'or "replicas" (StatefulSet) in the manifest; 1 to train alone. `tfdist submit --scheduler kubernetes '
            "--dry-run` prints a complete manifest"
        )
    size, short = number(env, _SIZE), pod_name(env)
    if size == 1:
        return Membership(0, 1, NAME, "")  # each pod of the Job trains alone
    ordinal = _ORDINAL.search(short)
    rank = number(env, _INDEX) if _INDEX in env else int(ordinal.group(1))  # type: ignore[union-attr]
    own = env.get("TFDIST_HOST") or socket.getfqdn(short)
    first = None
    if ordinal is not None and int(ordinal.group(1)) == rank:
        # An address, or another name, does not tell that of the first pod.
        like_own = own if _ORDINAL.search(own.partition(".")[0]) else socket.getfqdn(short)
        name, dot, domain = like_own.partition(".")
        first = _ORDINAL.sub("-0", name) + dot + domain
    return Membership(rank, size, NAME, f"kubernetes-{_ORDINAL.sub('', short)}", host=first, own_name=own)


def pod_name(env: Mapping[str, str]) -> str:
    """The pod's host name: its name with the index, for the kinds above."""
    return (env.get("HOSTNAME") or socket.gethostname()).partition(".")[0]  # setHostnameAsFQDN
