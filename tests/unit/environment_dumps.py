"""What systems put into the environment of a process, each with what is to be read from it, and with a neighbour.

From running systems: Slurm 22.05, Open MPI 4.1.4 and MPICH 4, alone and in Slurm. The others from their sources and
documentation. A neighbour is a similar environment that must not be taken for the same.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Dump:
    """One process.

    Attributes:
        env: its variables.
        environment: the environment that is to be found.
        rank: its rank; `None` if it is no member of a job of several.
        size: how many there are.
        neighbour: what has to be set (or, as `None`, unset) for it to be another environment.
        instead: that one.
        host: of rank 0.
        local: number among those on its host, and how many these are.
        has_channel: whether rank 0 tells it where it is.
    """

    env: dict[str, str]
    environment: str
    rank: int | None
    size: int
    neighbour: dict[str, str | None]
    instead: str
    host: str | None = None
    local: tuple[int | None, int | None] = (None, None)
    has_channel: bool = False


_SLURM_JOB = {
    "SLURM_CLUSTER_NAME": "lab",
    "SLURM_JOB_ID": "9",
    "SLURM_JOB_NODELIST": "n[9-11]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_NODELIST": "n[9-11]",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "2,1(x2)",
}
_SLURM_BATCH = {**_SLURM_JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
_SLURM_STEP = {
    **_SLURM_JOB,
    "SLURMD_NODENAME": "n9",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_GTIDS": "0,3",
    "SLURM_LAUNCH_NODE_IPADDR": "10.77.0.1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[9-11]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
}
_OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "269484032.0;tcp://10.77.0.1:39123",
    "PMIX_NAMESPACE": "269484033",
    "PMIX_RANK": "1",
}
_MPICH = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "6",
    "PMI_HOSTNAME": "n9",
    "PMI_RANK": "1",
    "PMI_SIZE": "3",
}
_PALS = {
    "PALS_APID": "5f0d7e9c-2b1d-4b8a-9a55-7d6a6d1c1f60",
    "PALS_LOCAL_RANKID": "1",
    "PALS_NODEID": "1",
    "PALS_RANKID": "2",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "2",
    "PMI_RANK": "2",
    "PMI_SIZE": "4",
}
_FOUR = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500"}
_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
_INDEXED_JOB = {
    **_POD,
    "HOSTNAME": "train-3",
    "JOB_COMPLETION_INDEX": "3",
    "TFDIST_HOST": "train-3.train.default.svc.cluster.local",
    "TFDIST_SIZE": "4",
}
_TF_JOB = (
    '{"cluster": {"ps": ["job-ps-0.ns.svc:2222"], "worker": ["job-worker-0.ns.svc:2222", "job-worker-1.ns.svc:2222"]},'
    ' "task": {"type": "worker", "index": 1}, "environment": "cloud"}'
)
_SPARSE_TF_JOB = (
    '{"sparseCluster": {"ps": ["job-ps-0.ns.svc:2222"], "worker": {"1": "job-worker-1.ns.svc:2222"}},'
    ' "task": {"type": "worker", "index": 1}}'
)
_VERTEX_CLUSTER = (
    '"cluster": {"workerpool0": ["cmle-training-workerpool0-0:2222"],'
    ' "workerpool1": ["cmle-training-workerpool1-0:2222", "cmle-training-workerpool1-1:2222"]}'
)
_VERTEX_SPEC = f'{{{_VERTEX_CLUSTER}, "environment": "cloud", "task": {{"type": "workerpool1", "index": 1}}}}'

DUMPS = {
    "by hand": Dump(
        {"TFDIST_RANK": "1", "TFDIST_SIZE": "3", "TFDIST_LOCAL_RANK": "0", "TFDIST_LOCAL_SIZE": "1"},
        *("TFDIST_RANK", 1, 3, {"TFDIST_RANK": None}, "single process"),
        local=(0, 1),
    ),
    "by hand, in Slurm": Dump(
        {**_SLURM_STEP, "TFDIST_RANK": "0", "TFDIST_SIZE": "1"},
        *("TFDIST_RANK", None, 1, {"TFDIST_RANK": None, "TFDIST_SIZE": None}, "Slurm"),
    ),
    "Kubeflow TFJob": Dump({**_POD, "TF_CONFIG": _TF_JOB}, "TF_CONFIG", 1, 2, {"TF_CONFIG": None}, "single process"),
    "Kubeflow TFJob with dynamic workers": Dump(
        {**_POD, "TF_CONFIG": _SPARSE_TF_JOB}, "TF_CONFIG", 0, 1, {"TF_CONFIG": None}, "single process"
    ),
    "Ray Train": Dump(
        {
            "TF_CONFIG": '{"cluster": {"worker": ["a:41", "b:42"]}, "task": {"type": "worker", "index": 0}}',
            "TF_USE_LEGACY_KERAS": "1",
        },
        *("TF_CONFIG", 0, 2, {"TF_CONFIG": None}, "single process"),
    ),
    "Vertex AI": Dump(
        {"CLUSTER_SPEC": _VERTEX_SPEC, "CLOUD_ML_PROJECT_ID": "7"},
        # Another program's variable of that name.
        *("Vertex AI", 2, 3, {"CLOUD_ML_PROJECT_ID": None, "CLUSTER_SPEC": "nodes: 3"}, "single process"),
    ),
    "torchrun in a Slurm step": Dump(
        {
            **_SLURM_STEP,
            **_FOUR,
            "GROUP_RANK": "1",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": "none",
        },
        *("torchrun", 2, 4, {"TORCHELASTIC_RUN_ID": None}, "Slurm"),
        host="node-1",
        local=(0, 2),
    ),
    "horovodrun": Dump(
        {
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": "4321",
            "HOROVOD_HOSTNAME": "node-2",
            "HOROVOD_LOCAL_RANK": "0",
            "HOROVOD_LOCAL_SIZE": "1",
            "HOROVOD_RANK": "1",
            "HOROVOD_SIZE": "2",
        },
        # What tfdist has set itself, for Horovod.
        *("horovodrun", 1, 2, {"TFDIST_HOROVOD": "4321"}, "single process"),
        local=(0, 1),
        has_channel=True,
    ),
    "Open MPI": Dump(
        _OPEN_MPI,
        *("Open MPI", 1, 2, {"OMPI_COMM_WORLD_RANK": None}, "single process"),
        local=(0, 1),
        has_channel=True,
    ),
    "Open MPI in Slurm": Dump(
        # The Slurm variables are those of mpirun's daemon on this node, one on each.
        {
            **_SLURM_STEP,
            **_OPEN_MPI,
            "SLURM_PROCID": "1",
            "SLURM_STEP_NUM_TASKS": "2",
            "OMPI_COMM_WORLD_RANK": "5",
            "OMPI_COMM_WORLD_SIZE": "8",
        },
        *("Open MPI", 5, 8, {"OMPI_COMM_WORLD_RANK": None}, "Slurm"),
        local=(0, 1),
        has_channel=True,
    ),
    "MPICH": Dump(_MPICH, "MPICH", 1, 3, {"PMI_SIZE": None}, "single process", local=(1, 2), has_channel=True),
    "Intel MPI in LSF": Dump(
        {**_MPICH, "I_MPI_ROOT": "/opt/intel", "LSB_JOBID": "8", "LSB_MCPU_HOSTS": "a 4"},
        *("Intel MPI", 1, 3, {"PMI_SIZE": None}, "allocation"),
        local=(1, 2),
        has_channel=True,
    ),
    "MVAPICH2": Dump(
        {
            "MPIRUN_ID": "77",
            "MV2_COMM_WORLD_LOCAL_RANK": "1",
            "MV2_COMM_WORLD_LOCAL_SIZE": "2",
            "MV2_COMM_WORLD_RANK": "3",
            "MV2_COMM_WORLD_SIZE": "4",
        },
        *("MVAPICH2", 3, 4, {"MV2_COMM_WORLD_SIZE": None}, "single process"),
        local=(1, 2),
        has_channel=True,
    ),
    "MVAPICH": Dump(
        {
            "MPIRUN_ID": "77",
            "MVP_COMM_WORLD_LOCAL_RANK": "1",
            "MVP_COMM_WORLD_LOCAL_SIZE": "2",
            "MVP_COMM_WORLD_RANK": "3",
            "MVP_COMM_WORLD_SIZE": "4",
        },
        *("MVAPICH", 3, 4, {"MVP_COMM_WORLD_SIZE": None}, "single process"),
        local=(1, 2),
        has_channel=True,
    ),
    "Slurm": Dump(
        _SLURM_STEP,
        *("Slurm", 3, 4, {"SLURM_STEP_NODELIST": None, "SLURM_NTASKS": "1"}, "allocation"),
        host="n9",
        local=(1, 2),
    ),
    "Slurm, a step of two tasks of a job of four": Dump(
        {
            **_SLURM_STEP,
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "1",
            "SLURM_PROCID": "1",
            "SLURM_STEP_ID": "1",
            "SLURM_STEP_NODELIST": "rack[0-1]n[09-11]",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        },
        *("Slurm", 1, 2, {"SLURM_PROCID": None, "SLURM_NTASKS": "1"}, "allocation"),
        host="rack0n09",
        local=(0, 1),
    ),
    "Slurm, srun --mpi=pmi2": Dump(
        {
            **_SLURM_STEP,
            "PMI_FD": "5",
            "PMI_JOBID": "9.0",
            "PMI_RANK": "3",
            "PMI_SIZE": "4",
        },
        # A rank of mpiexec, whose daemon srun has started on this node.
        *("Slurm", 3, 4, {"MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}, "MPICH"),
        host="n9",
        local=(1, 2),
    ),
    "Slurm, srun --mpi=cray_shasta": Dump(
        {**_SLURM_STEP, **_PALS, "PALS_APID": "9.0", "PMI_JOBID": "9", "PALS_RANKID": "3", "PMI_RANK": "3"},
        # mpiexec of PALS, in a job of PBS.
        *("Slurm", 3, 4, {"SLURM_STEP_NODELIST": None}, "PALS"),
        host="n9",
        local=(1, 2),
    ),
    "Slurm, a step of a heterogeneous job, whose list of nodes is sorted": Dump(
        {
            **{**_SLURM_STEP, "SLURMD_NODENAME": "n11", "SLURM_LOCALID": "0", "SLURM_PROCID": "0"},
            **{"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_0": "n[11-12]"},
            "SLURM_JOB_NODELIST_HET_GROUP_1": "n[8-10]",
        },
        *("Slurm", 0, 4, {"SLURM_STEP_NODELIST": None}, "allocation"),
        host="n11",
        local=(0, 2),
    ),
    "MPICH in Slurm, with MpiDefault=pmi2": Dump(
        # The Slurm variables, and PMI_JOBID, are those of mpiexec's daemon, the only one.
        {
            **_SLURM_STEP,
            "SLURM_PROCID": "0",
            "SLURM_STEP_NUM_TASKS": "1",
            "PMI_JOBID": "9.0",
            **_MPICH,
        },
        *("MPICH", 1, 3, {"MPI_LOCALRANKID": None}, "Slurm"),
        local=(1, 2),
        has_channel=True,
    ),
    "Slurm, the shell of an interactive salloc, one node": Dump(
        {
            **_SLURM_STEP,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
        },
        *("allocation", None, 1, {"SLURM_STEP_ID": "1"}, "Slurm"),
    ),
    "Slurm, the same shell, of a recent version": Dump(
        {
            **_SLURM_STEP,
            "SLURM_JOB_NUM_NODES": "1",
            "SLURM_NTASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_STEP_ID": "-6",
            "SLURM_STEP_NUM_TASKS": "1",
        },
        *("allocation", None, 1, {"SLURM_STEP_ID": "1"}, "Slurm"),
    ),
    "Slurm, srun --pty bash": Dump(
        {**_SLURM_STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"},
        *("Slurm", None, 1, {"SLURM_STEP_NODELIST": None, "SLURM_NTASKS": "1"}, "allocation"),
    ),
    "Slurm, a batch script for one task": Dump(
        {**_SLURM_BATCH, "SLURM_NTASKS": "1"}, "allocation", None, 1, {"SLURM_JOB_ID": None}, "single process"
    ),
    "PALS": Dump(
        {**_PALS, "PBS_JOBID": "3.server"},
        *("PALS", 2, 4, {"PALS_RANKID": None}, "MPICH"),
        local=(1, 2),
        has_channel=True,
    ),
    "Flux": Dump(
        {
            "FLUX_JOB_ID": "\u01922ozEEVBDmm",
            "FLUX_JOB_NNODES": "2",
            "FLUX_JOB_SIZE": "4",
            "FLUX_TASK_LOCAL_ID": "1",
            "FLUX_TASK_RANK": "3",
            "PMI_FD": "19",
            "PMI_RANK": "3",
            "PMI_SIZE": "4",
        },
        # mpiexec that Flux has started.
        *("Flux", 3, 4, {"MPI_LOCALRANKID": "0"}, "MPICH"),
        local=(1, None),
        has_channel=True,
    ),
    "Azure ML": Dump(
        {**_OPEN_MPI, "AZ_BATCH_MASTER_NODE": "10.0.0.4:6000"},
        # On a single node.
        *("Azure ML", 1, 2, {"AZ_BATCH_MASTER_NODE": None}, "Open MPI"),
        host="10.0.0.4",
        local=(0, 1),
    ),
    "LSF with jsrun": Dump(
        {
            "JSM_NAMESPACE_LOCAL_RANK": "0",
            "JSM_NAMESPACE_LOCAL_SIZE": "1",
            "JSM_NAMESPACE_RANK": "2",
            "JSM_NAMESPACE_SIZE": "4",
            "LSB_JOBID": "7",
            "LSB_MCPU_HOSTS": "batch 1",
        },
        *("LSF's jsrun", 2, 4, {"JSM_NAMESPACE_RANK": None}, "allocation"),
        local=(0, 1),
        has_channel=True,
    ),
    "SageMaker": Dump(
        {
            "SM_CURRENT_HOST": "algo-2",
            "SM_HOSTS": '["algo-1", "algo-2"]',
            "SM_NUM_GPUS": "0",
            "TRAINING_JOB_NAME": "digits",
        },
        *("SageMaker", 1, 2, {"SM_CURRENT_HOST": None}, "single process"),
        host="algo-1",
        local=(0, 1),
    ),
    "AWS Batch, a multi-node parallel job": Dump(
        {
            "AWS_BATCH_JOB_ID": "b3f2#2",
            "AWS_BATCH_JOB_MAIN_NODE_INDEX": "1",
            "AWS_BATCH_JOB_MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.7",
            "AWS_BATCH_JOB_NODE_INDEX": "2",
            "AWS_BATCH_JOB_NUM_NODES": "3",
        },
        *("AWS Batch", 1, 3, {"AWS_BATCH_JOB_NUM_NODES": None}, "single process"),
        host="10.0.0.7",
    ),
    "HTCondor's parallel universe": Dump(
        {"_CONDOR_NPROCS": "3", "_CONDOR_PROCNO": "1", "_CONDOR_SCRATCH_DIR": "/scratch"},
        *("HTCondor", 1, 3, {"_CONDOR_NPROCS": None}, "single process"),
    ),
    "SkyPilot": Dump(
        {
            "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.8",
            "SKYPILOT_NODE_RANK": "1",
            "SKYPILOT_NUM_NODES": "2",
            "SKYPILOT_TASK_ID": "sky-2026-11-26-18-00-04-563597_train_id-1",
        },
        *("SkyPilot", 1, 2, {"SKYPILOT_NODE_RANK": None}, "single process"),
        host="10.0.0.7",
    ),
    "Kubernetes LeaderWorkerSet": Dump(
        {
            **{**_POD, "HOSTNAME": "train-0-2", "LWS_LEADER_ADDRESS": "train-0.train.default"},
            **{"LWS_GROUP_SIZE": "4", "LWS_WORKER_INDEX": "2"},
        },
        *("LeaderWorkerSet", 2, 4, {"LWS_WORKER_INDEX": None}, "single process"),
        host="train-0.train.default",
    ),
    "Volcano with the plugin svc": Dump(
        {
            **{**_POD, "HOSTNAME": "train-worker-1", "VC_TASK_INDEX": "1", "VK_TASK_INDEX": "1"},
            **{"VC_MASTER_HOSTS": "train-master-0.train", "VC_MASTER_NUM": "1"},
            **{"VC_WORKER_HOSTS": "train-worker-0.train,train-worker-1.train", "VC_WORKER_NUM": "2"},
        },
        # Without the plugin.
        *("Volcano", 2, 3, {"VC_MASTER_HOSTS": None, "VC_WORKER_HOSTS": None}, "single process"),
        host="train-master-0.train",
    ),
    "Kubernetes Indexed Job with PyTorch's variables": Dump(
        {**_INDEXED_JOB, **_FOUR, "RANK": "3", "TFDIST_SIZE": ""},
        *("RANK and WORLD_SIZE", 3, 4, {"MASTER_ADDR": None}, "Kubernetes"),
        host="node-1",
    ),
    "Kubernetes Indexed Job": Dump(
        _INDEXED_JOB,
        *("Kubernetes", 3, 4, {"KUBERNETES_SERVICE_HOST": None}, "single process"),
        host="train-0.train.default.svc.cluster.local",
    ),
    "Kubernetes Indexed Job, TFDIST_HOST from status.podIP": Dump(
        {**_INDEXED_JOB, "TFDIST_HOST": "10.1.2.3"},
        *("Kubernetes", 3, 4, {"KUBERNETES_SERVICE_HOST": None}, "single process"),
        host="train-0",  # there is no such name here, so it has no domain
    ),
    "Kubernetes Indexed Job, setHostnameAsFQDN": Dump(
        {**_INDEXED_JOB, "HOSTNAME": "train-3.train.default.svc.cluster.local"},
        *("Kubernetes", 3, 4, {"KUBERNETES_SERVICE_HOST": None}, "single process"),
        host="train-0.train.default.svc.cluster.local",
    ),
    "Kubernetes Indexed Job of trainings that are alone": Dump(
        {**_INDEXED_JOB, "TFDIST_SIZE": "1"},
        *("Kubernetes", None, 1, {"KUBERNETES_SERVICE_HOST": None}, "single process"),
    ),
    "Kubernetes JobSet": Dump(
        {**_INDEXED_JOB, "HOSTNAME": "set-workers-0-3", "TFDIST_HOST": "set-workers-0-3.set"},
        *("Kubernetes", 3, 4, {"KUBERNETES_SERVICE_HOST": None}, "single process"),
        host="set-workers-0-0.set",
    ),
    "Kubernetes StatefulSet": Dump(
        {**_POD, "HOSTNAME": "train-1", "TFDIST_HOST": "train-1.train", "TFDIST_SIZE": "2"},
        # A pod of a Deployment.
        *("Kubernetes", 1, 2, {"HOSTNAME": "train-7d4b9c-x2x9k"}, "single process"),
        host="train-0.train",
    ),
    "Kubeflow PyTorchJob": Dump(
        {**_POD, **_FOUR}, "RANK and WORLD_SIZE", 2, 4, {"MASTER_ADDR": None}, "single process", host="node-1"
    ),
    "Kubeflow TrainJob": Dump(
        {
            **{**_POD, "HOSTNAME": "train-node-0-2", "JOB_COMPLETION_INDEX": "2", "PET_NPROC_PER_NODE": "8"},
            **{"PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "train-node-0-0.train"},
            "PET_MASTER_PORT": "29500",
        },
        # Without the policy "torch".
        *("Kubeflow Trainer", 2, 4, {"PET_NODE_RANK": None, "TFDIST_SIZE": "4"}, "Kubernetes"),
        host="train-node-0-0.train",
    ),
    "torchrun in a Kubeflow TrainJob": Dump(
        {
            **{**_POD, "JOB_COMPLETION_INDEX": "0", "PET_NNODES": "2", "PET_NODE_RANK": "0"},
            **{"PET_MASTER_ADDR": "train-node-0-0.train", "TORCHELASTIC_RUN_ID": "none"},
            **{"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "train-node-0-0.train", "MASTER_PORT": "29500"},
        },
        *("torchrun", 1, 4, {"TORCHELASTIC_RUN_ID": None, "RANK": None, "WORLD_SIZE": None}, "Kubeflow Trainer"),
        host="train-node-0-0.train",
        local=(1, 2),
    ),
    "PBS on one host": Dump({"PBS_JOBID": "3.server"}, "allocation", None, 1, {"PBS_JOBID": None}, "single process"),
    "Grid Engine on one host": Dump(
        {"PE_HOSTFILE": "/dev/null", "JOB_ID": "5", "NSLOTS": "8"},
        *("allocation", None, 1, {"PE_HOSTFILE": None}, "single process"),
    ),
    "by hand, beside what another system's variables say": Dump(
        {**_FOUR, "TFDIST_RANK": "0", "TFDIST_SIZE": "2"},
        *("TFDIST_RANK", 0, 2, {"TFDIST_RANK": None}, "RANK and WORLD_SIZE"),
    ),
    "nothing": Dump({}, "single process", None, 1, {"JOB_COMPLETION_INDEX": "0"}, "single process"),
}
