"""The meeting of all compute tasks before TensorFlow starts, so that nobody waits in vain inside TensorFlow."""

from __future__ import annotations

import time

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.roll_call_chief import Chief
from tfdist.cluster.roll_call_message import JobUnderWay, RollCallTimeout, members
from tfdist.cluster.roll_call_worker import Worker

__all__ = ["JobUnderWay", "RollCallTimeout", "meet"]


def meet(
    config: ClusterConfig,
    timeout: float = 300.0,
    info: dict | None = None,
    poll: float = 0.5,
    servers: bool = False,
    rejoin: bool = False,
) -> dict[int, dict]:
    """Waits until every compute task is there, and exchanges a small dictionary among them.

    They meet at the chief's own address, before TensorFlow's server takes it; it is free again on return.

    Args:
        config: The cluster as this process sees it.
        timeout: How many seconds to wait for everybody.
        info: What to tell the others; JSON values. Keys that start with `same.` must be equal on all tasks.
        poll: The longest pause, in seconds, between two attempts to reach the chief.
        servers: Whether the parameter servers come as well; all tasks must agree on that.
        rejoin: Whether to raise `JobUnderWay`, instead of waiting for the next roll call, when the chief has had its
            own and runs a TensorFlow server.

    Returns:
        The `info` of every task, by rank; those of parameter servers follow in their order.

    Raises:
        RollCallTimeout: If a task has not come in time; names it.
        ClusterError: If the tasks do not fit together: different clusters, the same task twice, different values of a
            `same.` key; or if this task takes no part (an evaluator, or a parameter server without `servers`).

    Example:
        >>> meet(ClusterConfig.single_process(), info={"same.keras": "3.15.0"})
        {0: {'same.keras': '3.15.0'}}
    """
    info = {} if info is None else info
    present = members(config, servers)
    own = (config.task_type, config.task_index)
    if own not in present:
        raise ClusterError(
            f"{config.task_type} {config.task_index} takes no part in the roll call; only chief"
            f"{', worker and ps' if servers else ' and worker'} tasks do"
        )
    if len(present) == 1:
        return {0: info}
    deadline = time.monotonic() + timeout
    if config.is_chief:
        return Chief(config, present, info, timeout, deadline).run()
    return Worker(config, present, info, timeout, deadline, poll, rejoin).run()
