"""A step of a Slurm job: what srun starts.

The step's variables count, not the job's: a step may have fewer tasks and other nodes, and the batch script itself has
rank and size of the job without being in a step (see `allocation`). A node of the step has the tasks that srun's
distribution (block, cyclic, plane) gave it; only where rank 0 is has to be known here.

References:
    https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"; TensorFlow's SlurmClusterResolver assumes the
    block distribution, sorts hosts as text and gives two steps on one node the same ports.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Mapping

from tfdist.cluster.environments.variables import number, optional_number
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership

NAME = "Slurm"
_SCONTROL_SECONDS = 20.0
# Numbers of what are steps by name only: slurm.h, SLURM_INTERACTIVE_STEP (LaunchParameters=use_interactive_step),
# SLURM_BATCH_SCRIPT and SLURM_EXTERN_CONT.
_NO_STEPS = ("4294967290", "4294967291", "4294967292")


def detect(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process as a task; the shell of an interactive `salloc` is none."""
    return "SLURM_STEP_NODELIST" in env and "SLURM_PROCID" in env and env.get("SLURM_STEP_ID") not in _NO_STEPS


def has_started(env: Mapping[str, str]) -> bool:
    """Whether srun itself speaks PMI with this process, not an mpiexec that it has started."""
    return env.get("PMI_JOBID") == f"{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"


def read(env: Mapping[str, str]) -> Membership:
    """Rank and size of the step, and its first node.

    Raises:
        ClusterError: if a number is none, or rank 0 is on a node that cannot be told.

    Example:
        >>> env = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "n[9-11]"}
        >>> env |= {"SLURM_STEP_TASKS_PER_NODE": "3,1(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
        >>> read(env).host, read(env).local_size
        ('n9', 1)
    """
    rank, node = number(env, "SLURM_PROCID"), optional_number(env, "SLURM_NODEID")
    if rank == 0 and node and not env.get("TFDIST_MEETING", "").strip():
        raise ClusterError(
            f"{NAME}: received rank 0 on node {node} of {env['SLURM_STEP_NODELIST']}, by an arbitrary distribution; "
            "expected it on the first one. Set TFDIST_MEETING to the name of its host, on all tasks"
        )
    on_nodes = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    return Membership(
        rank=rank,
        size=number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"),
        source=f"{NAME} step {job}.{step}",
        job=f"slurm-{env.get('SLURM_CLUSTER_NAME', '')}-{job}-{step}-{env.get('SLURM_RESTART_COUNT', '0')}",
        host=first_host(env["SLURM_STEP_NODELIST"]),
        local_rank=optional_number(env, "SLURM_LOCALID"),
        local_size=on_nodes[node] if node is not None and node < len(on_nodes) else None,
        shared_home=True,
    )


def tasks_per_node(text: str) -> list[int]:
    """How many tasks each node has.

    Example:
        >>> tasks_per_node("3,1(x2)")
        [3, 1, 1]
    """
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def first_host(nodes: str) -> str:
    """The first of a list of nodes.

    Raises:
        ClusterError: if it is none.

    Example:
        >>> first_host("rack[0-1]n[09-11],x")
        'rack0n09'
    """
    import hostlist

    try:
        return hostlist.expand_hostlist(nodes)[0]
    except (hostlist.BadHostlist, IndexError):
        raise ClusterError(f"{NAME}: SLURM_STEP_NODELIST is {nodes!r}; expected a list of nodes") from None


def address_of(node: str) -> str:
    """What reaches a node: its name, or its NodeAddr if nobody else knows the name.

    Example:
        >>> address_of("localhost")
        'localhost'
    """
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        command = shutil.which("scontrol")
    if command is None:
        return node
    words = [command, "show", "--oneliner", "node", node]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, timeout=_SCONTROL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return node
    found = re.search(r"\bNodeAddr=(\S+)", answer.stdout)
    return found.group(1) if found else node
