"""Amazon SageMaker training jobs: one process on each host, which are listed in SM_HOSTS."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership

NAME = "SageMaker"


def detect(env: Mapping[str, str]) -> bool:
    """Whether SageMaker has started this process."""
    return bool(env.get("SM_HOSTS")) and bool(env.get("SM_CURRENT_HOST"))


def read(env: Mapping[str, str]) -> Membership:
    """The own place in the list of hosts, which is the same on all of them.

    Raises:
        ClusterError: if it is no list, or this host is not in it.

    Example:
        >>> str(read({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}))
        'rank 1 of 2, from SageMaker'
    """
    try:
        hosts = json.loads(env["SM_HOSTS"])
    except json.JSONDecodeError:
        hosts = None
    own = env["SM_CURRENT_HOST"]
    if not isinstance(hosts, list) or own not in hosts:
        raise ClusterError(f"SM_HOSTS is {env['SM_HOSTS']!r}; expected a JSON list with SM_CURRENT_HOST, {own!r}")
    return Membership(
        rank=hosts.index(own),
        size=len(hosts),
        source=NAME,
        job=f"sagemaker-{env.get('TRAINING_JOB_NAME', '')}",
        host=hosts[0],
        local_rank=0,
        local_size=1,
        own_name=own,
    )
