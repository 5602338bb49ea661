"""A step of a Slurm job: what srun starts.

The step's variables count, not the job's: a step may have fewer tasks and other nodes, and the batch script itself has
rank and size of the job without being in a step (see `single_process`). Which node has which tasks depends on srun's
distribution (block, cyclic, plane); only the node of rank 0 has to be known here.

References:
    https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES"; TensorFlow's SlurmClusterResolver assumes the
    block distribution, sorts hosts as text and gives two steps on one node the same ports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from tfdist.cluster import sockets
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.programs import output_of
from tfdist.cluster.variables import MEETING, number, optional_number, text

NAME = "Slurm"
_SCONTROL_SECONDS = 20.0
# Numbers of what are steps by name only: slurm.h, SLURM_INTERACTIVE_STEP (LaunchParameters=use_interactive_step),
# SLURM_BATCH_SCRIPT and SLURM_EXTERN_CONT. Recent versions write them as negative numbers.
_NO_STEPS = ("4294967290", "4294967291", "4294967292", "-6", "-5", "-4")
# With its number: the nodes of a component of a heterogeneous job.
_OF_COMPONENT = "SLURM_JOB_NODELIST_HET_GROUP_"


def detect(env: Mapping[str, str]) -> bool:
    """Whether srun has started this process as a task; the shell of an interactive `salloc` is not one."""
    return "SLURM_STEP_NODELIST" in env and "SLURM_PROCID" in env and env.get("SLURM_STEP_ID") not in _NO_STEPS


def has_started(env: Mapping[str, str]) -> bool:
    """Whether srun itself speaks PMI with this process (pmi2, cray_shasta, ParaStation), not an mpiexec inside of it.

    The daemons of Hydra's mpiexec may be tasks of Slurm's that speak PMI; MPI_LOCALRANKID is of its ranks only.
    """
    return detect(env) and "MPI_LOCALRANKID" not in env


def read(env: Mapping[str, str]) -> Membership:
    """Rank and size of the step, and its first node.

    Raises:
        ClusterError: if a number is none, or it is unknown which node rank 0 is on.

    Example:
        >>> env = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_NODELIST": "n[9-11]"}
        >>> env |= {"SLURM_STEP_TASKS_PER_NODE": "3,1(x2)", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
        >>> read(env).host, read(env).local_size
        ('n9', 1)
    """
    rank, node = number(env, "SLURM_PROCID"), optional_number(env, "SLURM_NODEID")
    components = sorted((name for name in env if name.startswith(_OF_COMPONENT)), key=lambda name: (len(name), name))
    first = first_host(env["SLURM_STEP_NODELIST"], [env[name] for name in components])
    elsewhere = bool(node) or env.get("SLURMD_NODENAME", first) != first
    if rank == 0 and elsewhere and not text(env, MEETING):
        raise ClusterError(
            f"{NAME}: received rank 0 on node {node} of {env['SLURM_STEP_NODELIST']}, by an arbitrary distribution or "
            f"in a step of several components; expected it on {first}, the first one. Set TFDIST_MEETING to the name "
            f"of its host, {env.get('SLURMD_NODENAME', '')}, on all tasks"
        )
    on_nodes = tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "")
    return Membership(
        rank=rank,
        size=number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"),
        source=f"{NAME} step {job}.{step}",
        job=f"slurm-{env.get('SLURM_CLUSTER_NAME', '')}-{job}-{step}-{env.get('SLURM_RESTART_COUNT', '0')}",
        host=first,
        local_rank=optional_number(env, "SLURM_LOCALID"),
        local_size=on_nodes[node] if node is not None and node < len(on_nodes) else None,
        shared_home=True,
    )


def tasks_per_node(counted: str) -> list[int]:
    """How many tasks each node has.

    Example:
        >>> tasks_per_node("3,1(x2)")
        [3, 1, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counted)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def first_host(nodes: str, components: Sequence[str] = ()) -> str:
    """The node of rank 0 of a step: the first one.

    Args:
        nodes: the list of its nodes, which is sorted where it has several components.
        components: the lists of those of a heterogeneous job, by which ranks are counted.

    Raises:
        ClusterError: if one is no list of nodes.

    Example:
        >>> first_host("rack[0-1]n[09-11],x"), first_host("n[1-4]", ["n[5-6]", "n[3-4]", "n[1-2]"])
        ('rack0n09', 'n3')
    """
    import hostlist

    try:
        step = hostlist.expand_hostlist(nodes)
        ordered = [node for component in components for node in hostlist.expand_hostlist(component) if node in step]
        return [*ordered, *step][0]
    except (hostlist.BadHostlist, IndexError):
        raise ClusterError(f"{NAME}: SLURM_STEP_NODELIST is {nodes!r}; expected a list of nodes") from None


def address_of(node: str) -> str:
    """What a node is reached by: its name, or Slurm's NodeAddr if the name cannot be resolved.

    Example:
        >>> address_of("localhost")
        'localhost'
    """
    if sockets.addresses_of(node):
        return node
    said = output_of(["scontrol", "show", "--oneliner", "node", node], seconds=_SCONTROL_SECONDS)
    found = re.search(r"\bNodeAddr=(\S+)", said or "")
    return found.group(1) if found else node
