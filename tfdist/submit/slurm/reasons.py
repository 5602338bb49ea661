"""Why a job waits, as Slurm calls it, in words. Pure.

References:
    https://slurm.schedmd.com/job_reason_codes.html
"""

from __future__ import annotations

import re

_NEVER = "it will not start as it is: cancel it, and submit it with other options"
_REASONS = {
    "BadConstraints": f"no node has what it asks for; {_NEVER}",
    "Dependency": "another job has to end first",
    "DependencyNeverSatisfied": f"the job that it waits for has failed; {_NEVER}",
    "JobArrayTaskLimit": "as many tasks of its array run as may",
    "JobHeldAdmin": "an administrator holds it back",
    "JobHeldUser": "held back by its user: `scontrol release` lets it go",
    "Licenses": "waits for a licence",
    "NodeDown": "a node that it needs is down",
    "PartitionConfig": (
        "it asks for more cores, memory, GPUs or nodes than its partition has or allows (`scontrol show partition`, "
        f"`sinfo -N -l`); {_NEVER}"
    ),
    "PartitionDown": "its partition starts no jobs at present",
    "PartitionInactive": "its partition starts no jobs at present",
    "PartitionNodeLimit": f"it asks for more nodes than a job may have in its partition; {_NEVER}",
    "PartitionTimeLimit": f"it asks for more time than a job may have in its partition (--time); {_NEVER}",
    "Priority": "jobs that are more urgent, or waited longer, come first",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved: `sinfo -R` shows why",
    "Reservation": "waits for its reservation to begin",
    "Resources": "waits until enough nodes are free",
    "SchedDefer": "waits for Slurm's next look at the queue",
}
_FAMILIES = (
    ("Invalid", f"Slurm does not know it, or does not allow it; {_NEVER}"),
    ("Account", f"the account may not use this partition; {_NEVER}"),
    ("QOS", "a limit of its quality of service is reached: `sacctmgr show qos`; it waits for other jobs of it to end"),
    ("Max", "a limit of its account or user is reached: `sacctmgr show assoc`; it waits for other jobs of it to end"),
    ("Assoc", "a limit of its account or user is reached: `sacctmgr show assoc`; it waits for other jobs of it to end"),
)


def reason_in_words(reason: str, start: str) -> str:
    """A reason with its explanation; one that is not known, as it is.

    Args:
        reason: as squeue prints it.
        start: when the job may start, or is expected to, as squeue prints it.

    Example:
        >>> reason_in_words("Resources", "N/A")
        'Resources (waits until enough nodes are free)'
        >>> reason_in_words("BeginTime", "2026-11-22T12:33:25")
        'BeginTime (not before 2026-11-22 12:33:25)'
    """
    name = re.split(r"[^A-Za-z]", reason, maxsplit=1)[0]
    words = _REASONS.get(name) or next((text for family, text in _FAMILIES if name.startswith(family)), "")
    if name == "BeginTime":
        words = f"not before {start.replace('T', ' ')}" if start[:1].isdigit() else "not before its time of begin"
    return f"{reason} ({words})" if words else reason
