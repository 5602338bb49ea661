"""horovodrun, Horovod's launcher with Gloo. `tfdist.HorovodStrategy` is connected by Horovod itself."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.environments.variables import number, optional_number
from tfdist.cluster.membership import Membership

NAME = "horovodrun"
# Set beside the variables that tfdist sets for Horovod, with the port that is one of them.
OWN = "TFDIST_HOROVOD"


def detect(env: Mapping[str, str]) -> bool:
    """Whether horovodrun has started this process."""
    own = env.get(OWN)
    if own is not None and own == env.get("HOROVOD_GLOO_RENDEZVOUS_PORT"):
        return False  # set by tfdist.HorovodStrategy, in this process or in one that has started it
    return bool(env.get("HOROVOD_RANK")) and bool(env.get("HOROVOD_SIZE"))


def read(env: Mapping[str, str]) -> Membership:
    """Rank and size; where rank 0 is, the ranks tell each other by Horovod's rendezvous.

    Raises:
        ClusterError: if a number is none.

    Example:
        >>> str(read({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321"}))
        'rank 0 of 2, from horovodrun'
    """
    address, port = env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", ""), env.get("HOROVOD_GLOO_RENDEZVOUS_PORT", "")
    return Membership(
        rank=number(env, "HOROVOD_RANK"),
        size=number(env, "HOROVOD_SIZE"),
        source=NAME,
        job=f"horovod-{address}:{port}",
        channel="horovod_store" if address and port else None,
        local_rank=optional_number(env, "HOROVOD_LOCAL_RANK"),
        local_size=optional_number(env, "HOROVOD_LOCAL_SIZE"),
    )
