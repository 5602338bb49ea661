"""What Kubernetes says about a job, as a `Status`. Pure: it takes objects of the client, or what is like them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfdist.submit.status import FAILED, QUEUED, RUNNING, SUCCEEDED, Status

_OVER = {"Complete": SUCCEEDED, "Failed": FAILED}


def status_of(job: Any, pods: Sequence[Any]) -> Status:
    """The state of a job.

    Args:
        job: the Job.
        pods: those that it has now.
    """
    started = job.status.start_time.timestamp() if job.status.start_time else None
    for condition in job.status.conditions or ():
        if condition.type in _OVER and condition.status == "True":
            ended = condition.last_transition_time.timestamp() if condition.last_transition_time else None
            state = _OVER[condition.type]
            return Status(state, _why(condition) if state == FAILED else "", started, ended)
    waiting = [pod for pod in pods if pod.status.phase == "Pending"]
    detail = f"{job.status.failed} pods have failed" if job.status.failed else ""
    if waiting and not any(pod.status.phase == "Running" for pod in pods):
        return Status(QUEUED, _obstacle(waiting))
    if not pods:
        return Status(QUEUED, "no pod yet")
    if waiting:
        detail = f"{len(waiting)} of {job.spec.completions} pods wait" + (
            f": {why}" if (why := _obstacle(waiting)) else ""
        )
    return Status(RUNNING, detail, started)


def chief_of(pods: Sequence[Any]) -> Any | None:
    """The newest pod with index 0; one that is left of an earlier attempt does not count."""
    found = [pod for pod in pods if _index(pod) == "0"]
    return max(found, key=lambda pod: pod.metadata.creation_timestamp) if found else None


def _index(pod: Any) -> str | None:
    return (pod.metadata.annotations or {}).get("batch.kubernetes.io/job-completion-index")


def _why(condition: Any) -> str:
    return ": ".join(part for part in (condition.reason, condition.message) if part)


def _obstacle(pods: Sequence[Any]) -> str:
    """Why pods wait: an image that is not there, or no place for them."""
    for pod in pods:
        for container in pod.status.container_statuses or ():
            if container.state and container.state.waiting and container.state.waiting.reason != "ContainerCreating":
                return ": ".join(filter(None, (container.state.waiting.reason, container.state.waiting.message)))
        for condition in pod.status.conditions or ():
            if condition.type == "PodScheduled" and condition.status == "False":
                return condition.message or condition.reason or ""
    return ""
