"""Reading environment variables; the names of those that several modules use."""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.cluster.errors import ClusterError

# Where rank 0 can be met, set by a person: a host, or host:port.
MEETING = "TFDIST_MEETING"
# A secret of the job.
TOKEN = "TFDIST_TOKEN"
# How many of the ranks are parameter servers.
SERVERS = "TFDIST_PS"
# Names a run of `tfdist run`: whoever has it belongs to that run.
RUN_ID = "TFDIST_RUN_ID"
# What carries the collectives of `tfdist.MultiWorkerMirroredStrategy`; `tfdist run --transport` sets it everywhere.
TRANSPORT_VARIABLE = "TFDIST_TRANSPORT"
AUTO, TENSORFLOW, DIRECT, HOROVOD = TRANSPORTS = ("auto", "tensorflow", "direct", "horovod")


def text(env: Mapping[str, str], name: str) -> str:
    """The value of a variable without the white space around it; empty if it is not set."""
    return env.get(name, "").strip()


def number(env: Mapping[str, str], name: str) -> int:
    """The whole number that a variable has.

    Raises:
        ClusterError: If it has none.

    Example:
        >>> number({"RANK": "3"}, "RANK")
        3
    """
    value = optional_number(env, name)
    if value is None:
        raise ClusterError(f"{name} is not set; expected a whole number")
    return value


def optional_number(env: Mapping[str, str], name: str) -> int | None:
    """The whole number that a variable has; `None` if the variable is not set, or empty.

    Raises:
        ClusterError: If it is no whole number.

    Example:
        >>> optional_number({}, "RANK")
    """
    value = text(env, name)
    try:
        return int(value) if value else None
    except ValueError:
        raise ClusterError(f"{name} is {value!r}; expected a whole number") from None


def chosen_transport(env: Mapping[str, str]) -> str:
    """The transport that the environment asks for; by default whichever fits the devices.

    Raises:
        ValueError: If there is no such transport.

    Example:
        >>> chosen_transport({}), chosen_transport({"TFDIST_TRANSPORT": "horovod"})
        ('auto', 'horovod')
    """
    value = env.get(TRANSPORT_VARIABLE) or AUTO
    if value not in TRANSPORTS:
        raise ValueError(
            f"Received: {TRANSPORT_VARIABLE}={value!r}. Expected one of {', '.join(TRANSPORTS)}; or unset it."
        )
    return value
