"""The systems that a cluster can be found by, in the order in which they are asked.

Each has a name, `detect(env)` and `read(env)`. `read` returns a `ClusterConfig` where the system gives every address,
otherwise a `Membership`, which the rendezvous completes. A launcher that sets rank and size in variables is a row of
the table below; a system that needs code of its own is a module.

The first whose `detect` is true is read: what a person has set, then what is closest to the process. mpirun and
torchrun are started inside of Slurm's steps and Kubernetes' pods, so they come before these. RANK and its relatives may
be left over in a shell that starts tasks of Slurm's, but a manifest sets them on purpose.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tfdist.cluster.config import ClusterConfig, parse
from tfdist.cluster.environments import kubernetes, single_process, slurm
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.foreign_text import cleaned, listed, whole_number
from tfdist.cluster.membership import Membership
from tfdist.cluster.variables import number, optional_number, text

# --- Variables that list all processes as JSON ------------------------------------------------------------------------

_OWN, _TF_CONFIG, _SPEC = "TFDIST_CLUSTER", "TF_CONFIG", "CLUSTER_SPEC"
# The jobs that Vertex AI's pools are.
_JOBS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool2": "ps", "workerpool3": "evaluator"}
# What SageMaker itself tells a container; its training toolkit, which not all containers have, sets SM_HOSTS.
_RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")


def read_tfdist_cluster(env: Mapping[str, str]) -> ClusterConfig:
    """Reads TFDIST_CLUSTER, which `tfdist run` sets for each process, beside TF_CONFIG and equal to it.

    Raises:
        ClusterError: If it does not describe a cluster, or TF_CONFIG describes another one.

    Example:
        >>> value = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'
        >>> read_tfdist_cluster({"TFDIST_CLUSTER": value}).address
        'a:1'
    """
    config = ClusterConfig.from_tf_config(env[_OWN], _OWN)
    if text(env, _TF_CONFIG):
        other = read_tf_config(env)
        if other != config:
            raise ClusterError(
                f"{_OWN} and {_TF_CONFIG} disagree: {_OWN} says {config}; {_TF_CONFIG} says {other}. "
                f"`tfdist run` sets both: do not change {_TF_CONFIG} in the script, or unset {_OWN}"
            )
    return config


def read_tf_config(env: Mapping[str, str]) -> ClusterConfig:
    """Reads TF_CONFIG, TensorFlow's own variable, set by hand or by an orchestrator such as Kubeflow.

    Raises:
        ClusterError: If it does not describe a cluster.

    Example:
        >>> read_tf_config({"TF_CONFIG": "{}"}).is_single_process
        True
    """
    return ClusterConfig.from_tf_config(env[_TF_CONFIG], _TF_CONFIG)


def read_cluster_spec(env: Mapping[str, str]) -> ClusterConfig:
    """Reads CLUSTER_SPEC, which Google's Vertex AI sets where it sets no TF_CONFIG; the first pool is the chief.

    Raises:
        ClusterError: If it does not describe a cluster.

    Example:
        >>> spec = '{"cluster": {"workerpool0": ["a:2222"]}, "task": {"type": "workerpool0", "index": 0}}'
        >>> read_cluster_spec({"CLUSTER_SPEC": spec}).address
        'a:2222'
    """
    content = parse(env[_SPEC], _SPEC)
    cluster, task = content.get("cluster"), content.get("task")
    if not isinstance(cluster, Mapping) or not isinstance(task, Mapping):
        raise ClusterError(f'{_SPEC}: "cluster" or "task" is missing')
    jobs = {_JOBS.get(pool, pool): addresses for pool, addresses in cluster.items() if pool != "workerpool3"}
    own = str(task.get("type"))
    return ClusterConfig(jobs, _JOBS.get(own, own), task.get("index"), _SPEC)  # type: ignore[arg-type]


def _is_vertex(env: Mapping[str, str]) -> bool:
    """Whether Vertex AI has set CLUSTER_SPEC, a name that others may use as well."""
    return bool(text(env, _SPEC)) and ("CLOUD_ML_PROJECT_ID" in env or '"workerpool0"' in env[_SPEC])


def is_sagemaker(env: Mapping[str, str]) -> bool:
    """Whether this is an instance of a training job of Amazon SageMaker."""
    return bool(text(env, "SM_CURRENT_HOST")) or ("TRAINING_JOB_NAME" in env and _RESOURCES.is_file())


def read_sagemaker(env: Mapping[str, str]) -> Membership:
    """The position of the own host in Amazon SageMaker's list, which is the same on all hosts.

    Each host has one process.

    Raises:
        ClusterError: If it is no list, or this host is not in it.

    Example:
        >>> str(read_sagemaker({"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}))
        'rank 1 of 2, from SageMaker'
    """
    own, everyone = env.get("SM_CURRENT_HOST"), env.get("SM_HOSTS", "")
    if not (own and everyone) and _RESOURCES.is_file():
        told = json.loads(_RESOURCES.read_text())
        own, everyone = told["current_host"], json.dumps(told["hosts"])
    try:
        hosts = json.loads(everyone)
    except json.JSONDecodeError:
        hosts = None
    if not isinstance(hosts, list) or own not in hosts:
        raise ClusterError(
            f"SM_HOSTS is {everyone!r}; expected a JSON list with SM_CURRENT_HOST, {own!r}; {single_process.ALONE}"
        )
    return Membership(
        rank=hosts.index(own),
        size=len(hosts),
        source="SageMaker",
        job=f"sagemaker-{env.get('TRAINING_JOB_NAME', '')}",
        host=hosts[0],
        local_rank=0,
        local_size=1,
        own_name=own,
    )


def read_aws_batch(env: Mapping[str, str]) -> Membership:
    """The own node of a multi-node parallel job of AWS Batch, counted from the main node, whose address others know.

    Raises:
        ClusterError: If a number is missing, is none, or is too large.

    Example:
        >>> env = {"AWS_BATCH_JOB_NUM_NODES": "3", "AWS_BATCH_JOB_NODE_INDEX": "0"}
        >>> env |= {"AWS_BATCH_JOB_MAIN_NODE_INDEX": "2", "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.3"}
        >>> read_aws_batch(env).rank, read_aws_batch(env).host
        (1, '10.0.0.3')
    """
    node, size = number(env, AWS_BATCH.rank), number(env, AWS_BATCH.size)
    main = optional_number(env, "AWS_BATCH_JOB_MAIN_NODE_INDEX") or 0
    return Membership(
        rank=(node - main) % size if 0 <= node < size else node,
        size=size,
        source=AWS_BATCH.name,
        job=f"aws-batch-{env.get('AWS_BATCH_JOB_ID', '').partition('#')[0]}",
        # The main node does not have it, and meets the others on its own host.
        host=env.get("AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS", "localhost"),
    )


def _volcano_hosts(env: Mapping[str, str]) -> list[str]:
    """All pods of a Volcano job with the plugin svc, which sets a list for each task, such as VC_WORKER_HOSTS."""
    return [host for name in sorted(env) if re.fullmatch(r"VC_\w+_HOSTS", name) for host in env[name].split(",")]


def read_volcano(env: Mapping[str, str]) -> Membership:
    """The position of the own pod among those of a Volcano job; its tasks are in the order of their names.

    Raises:
        ClusterError: If this pod is none of them.

    Example:
        >>> env = {"VC_WORKER_HOSTS": "train-worker-0.train,train-worker-1.train", "HOSTNAME": "train-worker-1"}
        >>> read_volcano(env).rank, read_volcano(env).host
        (1, 'train-worker-0.train')
    """
    hosts, own = _volcano_hosts(env), kubernetes.pod_name(env)
    names = [host.partition(".")[0] for host in hosts]
    if own not in names:
        raise ClusterError(
            f"Received: the pod {own} of a Volcano job. Expected: one of {listed(names)}, which its plugin svc lists; "
            "or TFDIST_RANK, TFDIST_SIZE and TFDIST_MEETING"
        )
    return Membership(names.index(own), len(hosts), "Volcano", f"volcano-{hosts[0]}", hosts[0])


# --- Launchers that set rank and size in variables: a row for each ----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Launcher:
    """One launcher and its variables.

    Attributes:
        name: For messages.
        rank: The variable with the rank of the process.
        size: The variable with the number of processes.
        local_rank: The variable with the rank among the processes of the host; "" if there is none.
        local_size: The variable with the number of processes on the host; "" if there is none.
        job: What tells its jobs apart and is the same on all hosts; `{A|B}` is the value of A, or of B if A has none.
        needs: The variables that have a value in its processes, by default those of rank and size; a blank one counts
            as not set.
        unless: Whether something else has set these variables.
        host: The variable with the host of rank 0: the first one, if it lists several; without a port after it.
        has_channel: Whether rank 0 tells the others its host by a channel: see `tfdist.cluster.rendezvous`.
        shared_home: Whether the processes usually have the same home folder.
        count: How many processes the variable of the size says that there are.

    Example:
        >>> env = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "77"}
        >>> OPEN_MPI.detect(env), str(OPEN_MPI.read(env))
        (True, 'rank 0 of 2, from Open MPI')
        >>> RANK_VARIABLES.read({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node-1"}).host
        'node-1'
    """

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    job: str
    needs: tuple[str, ...] = ()
    unless: Callable[[Mapping[str, str]], bool] | None = None
    host: str = ""
    has_channel: bool = False
    shared_home: bool = False
    count: Callable[[Mapping[str, str], str], int | None] = optional_number

    def detect(self, env: Mapping[str, str]) -> bool:
        """Whether it has started this process."""
        return not self._missing(env) and (self.unless is None or not self.unless(env))

    def incomplete(self, env: Mapping[str, str]) -> dict[str, str]:
        """What to do, by the variable that says that this process is one of several, where others are missing.

        Raises:
            ClusterError: If the size is no number.

        Example:
            >>> MPICH.incomplete({"PMI_SIZE": "2"})["PMI_SIZE"].partition(".")[0]
            'Received: PMI_SIZE=2 without PMI_RANK'
            >>> MPICH.incomplete({"PMI_SIZE": "1"}), MPICH.incomplete({"PMI_RANK": "0", "PMI_SIZE": "2"})
            ({}, {})
        """
        missing, size = self._missing(env), self.count(env, self.size) or 0
        # People have other uses for a variable of the name RANK.
        rank = whole_number(text(env, self.rank))
        said = self.size if size > 1 else self.rank if rank is not None and rank >= size else ""
        if not (missing and said) or (self.unless is not None and self.unless(env)):
            return {}
        meanings = {self.rank: f", from 0 to {size - 1},", self.size: ", the number of processes,"}
        meanings[self.host] = ", the host of rank 0,"
        return {
            said: f"Received: {said}={cleaned(text(env, said), 200)} without {' and '.join(missing)}. Expected: "
            f"{' and '.join(name + meanings.get(name, '') for name in missing)} as well, or TF_CONFIG instead; to "
            f"train in this process alone, unset {said}, or set TFDIST_RANK=0 TFDIST_SIZE=1"
        }

    def _missing(self, env: Mapping[str, str]) -> list[str]:
        """The variables that its processes have, and this one has not."""
        return [name for name in self.needs or (self.rank, self.size) if not text(env, name)]

    def read(self, env: Mapping[str, str]) -> Membership:
        """Rank and size, and the host of rank 0 or how the processes can learn it.

        Raises:
            ClusterError: If a number is missing, or is none.
        """
        first = _HOST.match(text(env, self.host))
        return Membership(
            rank=number(env, self.rank),
            size=number(env, self.size),
            source=self.name,
            job=re.sub(r"\{(.+?)\}", lambda found: next(filter(None, map(env.get, found[1].split("|"))), ""), self.job),
            host=first[0] if first else None,
            has_channel=self.has_channel,
            local_rank=optional_number(env, self.local_rank),
            local_size=optional_number(env, self.local_size),
            shared_home=self.shared_home,
        )


# The first host of a list, or the one before a port.
_HOST = re.compile(r"[^\s:]+(?=:\d+\Z)|\S+")


# Set beside the variables that tfdist itself sets for Horovod; its value is the port that is one of these.
SET_FOR_HOROVOD = "TFDIST_HOROVOD"
_GLOO_HOST, _GLOO_PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"

# Set by hand, where a tool that tfdist does not know starts the processes.
BY_HAND = Launcher(
    "TFDIST_RANK",
    *("TFDIST_RANK", "TFDIST_SIZE", "TFDIST_LOCAL_RANK", "TFDIST_LOCAL_SIZE"),
    job="",
    needs=("TFDIST_RANK",),
)
# PyTorch's convention, set by hand or by Kubeflow's PyTorchJob. MASTER_PORT only tells jobs apart: who sets it may
# listen there. MASTER_ADDR may be "localhost" on the host of rank 0.
RANK_VARIABLES = Launcher(
    "RANK and WORLD_SIZE",
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    job="ranks-{MASTER_PORT}",
    needs=("RANK", "WORLD_SIZE", "MASTER_ADDR"),
    host="MASTER_ADDR",
)
# One torchrun on each host, several processes by each. TORCHELASTIC_RESTART_COUNT is not the same on all hosts.
TORCHRUN = dataclasses.replace(
    RANK_VARIABLES,
    name="torchrun",
    job="ranks-{MASTER_PORT}-{TORCHELASTIC_RUN_ID}",
    needs=("TORCHELASTIC_RUN_ID", *RANK_VARIABLES.needs),
)
# TrainJobs of Kubeflow Trainer with the policy "torch", one process a pod. The variables are those that torchrun reads;
# PET_NPROC_PER_NODE is for torchrun alone, and often the number of cores.
KUBEFLOW_TRAINER = dataclasses.replace(
    RANK_VARIABLES,
    name="Kubeflow Trainer",
    rank="PET_NODE_RANK",
    size="PET_NNODES",
    job="trainjob-{PET_MASTER_ADDR}",
    needs=("PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"),
    host="PET_MASTER_ADDR",
)
# Horovod's launcher with Gloo, unless tfdist.HorovodStrategy has set these variables, in this process or in one that
# has started it. That strategy is connected by Horovod itself.
HOROVODRUN = Launcher(
    "horovodrun",
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    job=f"horovod-{{{_GLOO_HOST}}}:{{{_GLOO_PORT}}}",
    unless=lambda env: SET_FOR_HOROVOD in env and env[SET_FOR_HOROVOD] == env.get(_GLOO_PORT),
    has_channel=True,
)
# Versions 4 and 5, and IBM Spectrum MPI, which derives from it. Inside of a Slurm allocation, the ranks see the
# SLURM_PROCID of mpirun's daemons.
OPEN_MPI = Launcher(
    "Open MPI",
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    job="open-mpi-{PMIX_NAMESPACE|OMPI_MCA_orte_hnp_uri}",
    has_channel=True,
)
# mpirun_rsh of MVAPICH2 and, since version 3, of MVAPICH; started by Hydra's mpiexec or by Slurm, these look like them.
MVAPICH = tuple(
    Launcher(
        name,
        *(f"{prefix}_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
        job="mvapich-{MPIRUN_ID}",
        has_channel=True,
        shared_home=True,
    )
    for name, prefix in (("MVAPICH2", "MV2"), ("MVAPICH", "MVP"))
)
# Azure Machine Learning's distribution "mpi": its nodes share no home folder, and rank 0 is on the first one.
AZURE_ML = dataclasses.replace(
    OPEN_MPI,
    name="Azure ML",
    needs=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "AZ_BATCH_MASTER_NODE"),
    host="AZ_BATCH_MASTER_NODE",
    has_channel=False,
)
# Hydra's mpiexec, and whatever else sets PMI_RANK and PMI_SIZE. Nothing tells one job from another on all hosts.
MPICH = Launcher(
    "MPICH",
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    job="",
    unless=slurm.has_started,
    has_channel=True,
)
INTEL_MPI = tuple(
    dataclasses.replace(MPICH, name="Intel MPI", needs=("PMI_RANK", "PMI_SIZE", own))
    for own in ("I_MPI_ROOT", "I_MPI_HYDRA_BOOTSTRAP")
)
# `flux run`, which also sets PMI_RANK and those of PALS. An mpiexec of Hydra that it has started sets MPI_LOCALRANKID.
FLUX = Launcher(
    "Flux",
    *("FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", ""),
    job="flux-{FLUX_ENCLOSING_ID}-{FLUX_JOB_ID}",
    unless=lambda env: "MPI_LOCALRANKID" in env,
    has_channel=True,
)
# HPE's mpiexec on Cray systems. Slurm's plugin cray_shasta sets the same variables, and so does Flux, whose batch
# scripts and shells keep the rank of its daemon.
PALS = Launcher(
    "PALS",
    *("PALS_RANKID", "PMI_SIZE", "PALS_LOCAL_RANKID", "PMI_LOCAL_SIZE"),
    job="pals-{PALS_APID}",
    unless=lambda env: "FLUX_URI" in env or slurm.has_started(env),
    has_channel=True,
)
MPI = (AZURE_ML, OPEN_MPI, *MVAPICH, FLUX, PALS, *INTEL_MPI, MPICH)
# IBM LSF's launcher, by JSM. LSF without jsrun has no ranks, see `single_process`.
JSRUN = Launcher(
    "LSF's jsrun",
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
    job="lsf-{LSB_JOBID}-{PMIX_NAMESPACE}",
    has_channel=True,
)
# A LeaderWorkerSet of Kubernetes: each group is a job.
LEADER_WORKER_SET = Launcher(
    "LeaderWorkerSet",
    *("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "", ""),
    job="lws-{LWS_LEADER_ADDRESS}",
    needs=("LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "LWS_LEADER_ADDRESS"),
    host="LWS_LEADER_ADDRESS",
)
# The parallel universe, which does not tell where the others are.
HTCONDOR = Launcher("HTCondor", *("_CONDOR_PROCNO", "_CONDOR_NPROCS", "", ""), job="condor")
# The commands of `setup` prepare a node, each for itself, and may know the number of nodes.
SKYPILOT = Launcher(
    "SkyPilot",
    *("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "", ""),
    job="skypilot-{SKYPILOT_TASK_ID}",
    needs=("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_IPS"),
    unless=lambda env: "SKYPILOT_SETUP_NODE_RANK" in env,
    host="SKYPILOT_NODE_IPS",
)
# By this it is detected; `read_aws_batch` counts ranks from the main node.
AWS_BATCH = Launcher("AWS Batch", *("AWS_BATCH_JOB_NODE_INDEX", "AWS_BATCH_JOB_NUM_NODES", "", ""), job="")


# --- All of them ------------------------------------------------------------------------------------------------------


class Environment(NamedTuple):
    """A system that needs code of its own.

    Attributes:
        name: For messages.
        detect: Whether it has started this process, by the environment variables.
        read: What it says about the cluster.
    """

    name: str
    detect: Callable[[Mapping[str, str]], bool]
    read: Callable[[Mapping[str, str]], ClusterConfig | Membership]


def _set(name: str) -> Callable[[Mapping[str, str]], bool]:
    """Whether this variable has a value; a blank one counts as not set."""
    return lambda env: bool(text(env, name))


TF_CONFIG = Environment("TF_CONFIG", _set("TF_CONFIG"), read_tf_config)
SLURM = Environment(slurm.NAME, slurm.detect, slurm.read)

ENVIRONMENTS: tuple[Environment | Launcher, ...] = (
    Environment("TFDIST_CLUSTER", _set("TFDIST_CLUSTER"), read_tfdist_cluster),
    BY_HAND,
    TF_CONFIG,
    Environment("Vertex AI", _is_vertex, read_cluster_spec),
    TORCHRUN,
    HOROVODRUN,
    *MPI,
    JSRUN,
    SLURM,
    Environment("SageMaker", is_sagemaker, read_sagemaker),
    KUBEFLOW_TRAINER,
    RANK_VARIABLES,
    Environment(AWS_BATCH.name, AWS_BATCH.detect, read_aws_batch),
    SKYPILOT,
    HTCONDOR,
    LEADER_WORKER_SET,
    Environment("Volcano", lambda env: bool(_volcano_hosts(env)), read_volcano),
    Environment(kubernetes.NAME, kubernetes.detect, kubernetes.read),
    Environment("allocation", single_process.is_allocated, single_process.read),
    Environment(single_process.NAME, lambda env: True, single_process.read),
)

# What starts processes by rank; other systems set TF_CONFIG themselves.
RANK_LAUNCHERS = (*MPI, SLURM)

# Variables that mean something only together: a process that has some of them would train alone, as all others would.
# In ENVIRONMENTS' order, in which the most general row for a variable is the last. Not here: what a Slurm job sets for
# its batch script and its shells, which `single_process` knows; SLURM_NTASKS alone, an option of srun that people set
# in login shells; VC_TASK_INDEX without a list of pods, of which each may train alone.
TOGETHER = (
    *(row for row in ENVIRONMENTS if isinstance(row, Launcher) and row is not BY_HAND),
    AWS_BATCH,
    Launcher(
        slurm.NAME,
        *("SLURM_PROCID", "SLURM_NTASKS", "", ""),
        job="",
        needs=("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID"),
        unless=lambda env: bool(text(env, "SLURM_JOB_ID")) or not text(env, "SLURM_PROCID"),
    ),
    Launcher(
        "SageMaker",
        *("", "SM_HOSTS", "", ""),
        job="",
        needs=("SM_HOSTS", "SM_CURRENT_HOST"),
        # A JSON list of names, which have no commas.
        count=lambda env, name: text(env, name).count(",") + 1,
    ),
)
