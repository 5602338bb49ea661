"""Which environment a process is in, and what it says, by what real systems set."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.unit.environment_dumps import DUMPS, Dump
from tfdist.cluster import ClusterConfig, ClusterError, discover
from tfdist.cluster.discovery import find
from tfdist.cluster.environments import ENVIRONMENTS
from tfdist.cluster.membership import Membership

CASES = pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS.keys())


def found_in(env: dict[str, str]) -> str:
    return next(environment for environment in ENVIRONMENTS if environment.detect(env)).name


def neighbour_of(dump: Dump) -> dict[str, str]:
    changed = {**dump.env, **dump.neighbour}
    return {name: value for name, value in changed.items() if value is not None}


@CASES
def test_the_environment_is_found(dump):
    assert found_in(dump.env) == dump.environment


@CASES
def test_a_neighbour_is_something_else(dump):
    assert found_in(neighbour_of(dump)) == dump.instead


@CASES
def test_what_it_says(dump):
    found = find(dump.env)
    if dump.rank is None:
        assert isinstance(found, ClusterConfig) and found.is_single_process
    elif isinstance(found, ClusterConfig):
        assert (found.rank, found.num_workers) == (dump.rank, dump.size)
    else:
        assert (found.rank, found.size) == (dump.rank, dump.size)
        assert (found.local_rank, found.local_size) == dump.local
        assert (found.host, found.has_channel) == (dump.host, dump.has_channel)


# What nothing else in these environments says: without it, they describe no cluster.
_WHOLE = {"TF_CONFIG": "TF_CONFIG", "Vertex AI": "CLUSTER_SPEC"}


@CASES
def test_a_process_that_lacks_a_variable_is_not_alone_without_a_word(dump, monkeypatch):
    monkeypatch.setattr("socket.getfqdn", str)  # which asks a name server
    # mpiexec's daemon, too, is a task that Slurm describes, the only one of its step.
    if dump.rank is None or dump.size == 1 or dump.env.get("SLURM_STEP_NUM_TASKS") == "1":
        return
    # A pod with a number of which the manifest says no more.
    whole = "TFDIST_SIZE" if dump is DUMPS["Kubernetes StatefulSet"] else _WHOLE.get(dump.environment)
    for name in dump.env.keys() - {whole}:
        for value in (None, "", " ", "x", "99"):
            changed = {key: text for key, text in {**dump.env, name: value}.items() if text is not None}
            try:
                found = find(changed)
            except ClusterError as error:
                assert "Expected" in str(error) or "expected" in str(error), (name, value)
            else:
                assert not (isinstance(found, ClusterConfig) and found.is_single_process), (name, value)


def test_every_environment_has_a_dump():
    covered = {dump.environment for dump in DUMPS.values()}
    # That of `tfdist run` is tested with TF_CONFIG.
    assert {environment.name for environment in ENVIRONMENTS} - covered == {"TFDIST_CLUSTER"}


@pytest.mark.parametrize("name", ["Open MPI", "Slurm", "Kubernetes Indexed Job", "SageMaker", "Kubeflow PyTorchJob"])
def test_jobs_are_told_apart(name):
    env = DUMPS[name].env
    other = {
        "Open MPI": {"PMIX_NAMESPACE": "1"},
        "Slurm": {"SLURM_STEP_ID": "1"},
        "Kubernetes Indexed Job": {"HOSTNAME": "other-3"},
        "SageMaker": {"TRAINING_JOB_NAME": "faces"},
        "Kubeflow PyTorchJob": {"MASTER_PORT": "29501"},
    }[name]
    assert find(env).job != find({**env, **other}).job
    assert find(env).job == find({**env, "HOME": "/home/somebody"}).job


@pytest.mark.parametrize(
    ("name", "changes", "problems"),
    [
        ("Slurm", {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8, but Slurm step 9.0 says that the number of processes is 4"]),
        ("Slurm", {"RANK": "0", "WORLD_SIZE": "4"}, ["RANK=0, but Slurm step 9.0 says that the rank is 3"]),
        ("Slurm", {"TFDIST_SIZE": "5"}, ["TFDIST_SIZE=5, but Slurm"]),
        ("Kubernetes Indexed Job", {"WORLD_SIZE": "8", "RANK": "1"}, ["RANK=1, but Kubernetes", "WORLD_SIZE=8, but"]),
    ],
)
def test_contradictions_are_named(name, changes, problems):
    with pytest.raises(ClusterError) as caught:
        find({**DUMPS[name].env, **changes})
    assert len(caught.value.problems) == len(problems)
    for line, problem in zip(caught.value.problems, problems, strict=True):
        assert problem in line and "Expected: the same. Unset" in line


def test_what_agrees_is_no_contradiction():
    found = find({**DUMPS["Slurm"].env, "WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "n9"})
    assert isinstance(found, Membership) and found.source == "Slurm step 9.0"


def tf_config(own: str, index: int, **jobs: int) -> str:
    cluster = {job: [f"{job}-{number}:4001" for number in range(count)] for job, count in jobs.items()}
    return json.dumps({"cluster": cluster, "task": {"type": own, "index": index}})


# The Slurm step is of 4 tasks, and this is rank 3; the job of MPICH has 3, and this is rank 1.
@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("Slurm", tf_config("worker", 0, worker=2), "TF_CONFIG of 2 tasks, but Slurm step 9.0 says that there are 4"),
        ("Slurm", tf_config("worker", 0, chief=1, worker=3, ps=1), "TF_CONFIG of 5 tasks, but Slurm step 9.0 says"),
        ("Slurm", "{}", "TF_CONFIG of 1 task, but Slurm step 9.0 says that there are 4. Expected"),
        ("MPICH", tf_config("worker", 1, worker=2), "TF_CONFIG of 2 tasks, but MPICH says that there are"),
        ("Open MPI in Slurm", tf_config("worker", 1, worker=2), "TF_CONFIG of 2 tasks, but Open MPI says that there"),
    ],
)
def test_a_left_over_tf_config_is_named(name, text, problem):
    with pytest.raises(ClusterError) as caught:
        find({**DUMPS[name].env, "TF_CONFIG": text})
    (line,) = caught.value.problems
    assert f"Received: {problem}" in line
    assert "Unset TF_CONFIG" in line and "cluster=tfdist.ClusterConfig.from_tf_config" in line


@pytest.mark.parametrize(
    ("name", "text", "more"),
    [
        ("Slurm", tf_config("worker", 3, worker=4), {}),
        ("Slurm", tf_config("worker", 2, chief=1, worker=3), {}),
        # Who of them comes first is the writer's choice.
        ("Slurm", tf_config("worker", 0, chief=1, worker=2, ps=1), {}),
        ("Slurm", tf_config("ps", 0, chief=1, worker=2, ps=1), {}),
        ("Slurm", tf_config("evaluator", 0, chief=1, worker=2), {}),
        # Ray's workers inherit what its daemons have.
        ("Slurm", tf_config("worker", 0, worker=2), {"RAY_RAYLET_PID": "7"}),
        # A task that is alone may have started others.
        ("Slurm, srun --pty bash", tf_config("worker", 1, worker=2), {}),
        # No task: a batch script, an allocation without a step.
        ("Slurm", tf_config("worker", 0, worker=2), {"SLURM_STEP_NODELIST": None}),
        ("Slurm, a batch script for one task", tf_config("worker", 0, worker=2), {}),
        # What cannot be told is not compared.
        ("Slurm", tf_config("worker", 0, worker=4), {"SLURM_PROCID": "0", "SLURM_NODEID": "1"}),
        ("Kubernetes Indexed Job", tf_config("worker", 0, worker=2), {}),
    ],
)
def test_a_tf_config_that_may_be_right_is_taken(name, text, more):
    env = {**DUMPS[name].env, "TF_CONFIG": text, **more}
    assert find({key: value for key, value in env.items() if value is not None}).source == "TF_CONFIG"


@pytest.mark.parametrize(
    ("arguments", "program"),
    [
        (["/usr/bin/tfdist", "check", "--timeout", "9"], "tfdist check"),
        (["/opt/tfdist/__main__.py", "check"], "tfdist check"),
        (["train.py", "--epochs", "9"], "python train.py"),
        (["/usr/bin/ipython"], "python ..."),
    ],
)
def test_what_was_started_is_named(arguments, program, monkeypatch):
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(ClusterError, match=f"Start it there with `srun {re.escape(program)}`; to train"):
        find({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4"})


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"SLURM_JOB_ID": "9", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, "Slurm job 9, which has 4 tasks"),
        ({"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "2"}, "Slurm job 9, which has 2 tasks"),
        ({"SLURM_JOB_ID": "9", "SLURM_HET_SIZE": "2", "SLURM_NTASKS": "1"}, "Slurm job 9, which has 2 tasks"),
        # The shell of `salloc -N3` where Slurm is set up with LaunchParameters=use_interactive_step.
        (
            {
                "SLURM_JOB_ID": "9",
                "SLURM_JOB_NUM_NODES": "3",
                "SLURM_PROCID": "0",
                "SLURM_STEP_ID": "4294967290",
                "SLURM_STEP_NODELIST": "n9",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            "Slurm job 9, which has 3 tasks",
        ),
        ({"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "a 4 b 4"}, "LSF job 7, which has 2 hosts"),
        ({"PBS_JOBID": "3.s", "PBS_NODEFILE": "FILE"}, "PBS job 3.s, which has 2 hosts"),
        ({"JOB_ID": "5", "PE_HOSTFILE": "FILE"}, "Grid Engine job 5, which has 2 hosts"),
    ],
)
def test_allocated_but_not_started_as_a_task(env, said, tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("a 4 all.q\na 4 all.q\nb 4 all.q\n")
    with pytest.raises(ClusterError, match="not started as one of its tasks") as caught:
        discover({name: value.replace("FILE", str(nodes)) for name, value in env.items()})
    assert said in str(caught.value)
    assert "python ...`" in str(caught.value) and "TFDIST_RANK=0 TFDIST_SIZE=1" in str(caught.value)


@pytest.mark.parametrize(
    "env",
    [
        {"WORLD_SIZE": "1"},
        {"RANK": "captain"},
        {"TFDIST_PS": "0"},
        {"MASTER_ADDR": "node-1"},
        {"PMI_SIZE": "1"},
        {"SM_HOSTS": '["algo-1"]'},
        {"SLURM_NTASKS": "2"},
        # A batch script on one node, for which nobody has asked for a number of tasks.
        {"SLURM_JOB_ID": "9", "SLURM_JOB_NUM_NODES": "1", "SLURM_PROCID": "0"},
        # A batch script or a shell of Flux.
        {"FLUX_URI": "local:///run/flux/local", "PALS_RANKID": "0"},
        {"VC_TASK_INDEX": "1"},
        {"SKYPILOT_SETUP_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2"},
        {"CLUSTER_SPEC": "nodes: 2"},
    ],
)
def test_what_says_nothing_of_several_processes(env):
    assert discover(env).is_single_process


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("Slurm", {"SLURM_PROCID": "four"}, "SLURM_PROCID is 'four'; expected a whole number"),
        ("Slurm", {"SLURM_PROCID": "4"}, "received rank 4 of 4 processes; expected one from 0 to 3"),
        ("Slurm", {"SLURM_PROCID": "0", "SLURM_NODEID": "1"}, "TFDIST_MEETING"),
        ("Slurm", {"SLURM_STEP_NODELIST": "n[9-"}, "expected a list of nodes"),
        ("by hand", {"TFDIST_SIZE": ""}, "TFDIST_SIZE is not set"),
        ("nothing", {"TFDIST_SIZE": "3"}, "Received: TFDIST_SIZE=3, in a process of which nothing tells the rank"),
        ("nothing", {"WORLD_SIZE": "4"}, "Received: WORLD_SIZE=4 without RANK and MASTER_ADDR. Expected: RANK, from 0"),
        ("nothing", {"WORLD_SIZE": "4", "RANK": "1"}, "Received: WORLD_SIZE=4 without MASTER_ADDR."),
        (
            "nothing",
            {"RANK": "3"},
            "Received: RANK=3 without WORLD_SIZE and MASTER_ADDR. Expected: WORLD_SIZE, the number of processes, and M",
        ),
        ("nothing", {"OMPI_COMM_WORLD_RANK": "3"}, "Received: OMPI_COMM_WORLD_RANK=3 without OMPI_COMM_WORLD_SIZE."),
        ("nothing", {"RANK": "3", "WORLD_SIZE": "1"}, "Received: RANK=3 without MASTER_ADDR. Expected: MASTER_ADDR, t"),
        (
            "nothing",
            {"PMI_SIZE": "2"},
            "Received: PMI_SIZE=2 without PMI_RANK. Expected: PMI_RANK, from 0 to 1, as well, or TF_CONFIG instead; to "
            "train in this process alone, unset PMI_SIZE, or set TFDIST_RANK=0 TFDIST_SIZE=1",
        ),
        ("nothing", {"PMI_SIZE": "two"}, "PMI_SIZE is 'two'; expected a whole number"),
        ("nothing", {"PALS_RANKID": "0"}, "Received: PALS_RANKID=0 without PMI_SIZE."),
        ("nothing", {"OMPI_COMM_WORLD_SIZE": "2"}, "Received: OMPI_COMM_WORLD_SIZE=2 without OMPI_COMM_WORLD_RANK."),
        ("nothing", {"FLUX_JOB_SIZE": "2"}, "Received: FLUX_JOB_SIZE=2 without FLUX_TASK_RANK."),
        ("nothing", {"HOROVOD_SIZE": "2"}, "Received: HOROVOD_SIZE=2 without HOROVOD_RANK."),
        (
            "nothing",
            {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
            "Received: PET_NNODES=2 without PET_MASTER_ADDR. Expected: PET_MASTER_ADDR, the host of rank 0, as well",
        ),
        ("nothing", {"LWS_GROUP_SIZE": "2"}, "Received: LWS_GROUP_SIZE=2 without LWS_WORKER_INDEX and LWS_LEADER_ADD"),
        (
            "nothing",
            {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
            "Received: SLURM_NTASKS=2 without SLURM_JOB_ID. Expected: SLURM_JOB_ID as well, or TF_CONFIG instead",
        ),
        (
            "nothing",
            {"SM_HOSTS": '["algo-1","algo-2"]'},
            'Received: SM_HOSTS=["algo-1","algo-2"] without SM_CURRENT_HOST. Expected: SM_CURRENT_HOST as well, or',
        ),
        (
            "nothing",
            {"SM_CURRENT_HOST": "algo-2"},
            "SM_HOSTS is ''; expected a JSON list with SM_CURRENT_HOST, 'algo-2",
        ),
        ("nothing", {"AWS_BATCH_JOB_NUM_NODES": "2"}, "=2 without AWS_BATCH_JOB_NODE_INDEX. Expected: AWS_BATCH_JOB_N"),
        (
            "AWS Batch, a multi-node parallel job",
            {"AWS_BATCH_JOB_NODE_INDEX": "3"},
            "AWS Batch: received rank 3 of 3 processes",
        ),
        (
            "LSF with jsrun",
            {"JSM_NAMESPACE_RANK": ""},
            "Received: JSM_NAMESPACE_SIZE=4 without JSM_NAMESPACE_RANK. Expected: JSM_NAMESPACE_RANK, from 0 to 3, as",
        ),
        ("nothing", {"TFDIST_PS": "1"}, "Received: TFDIST_PS=1, in a process that is none of several"),
        ("Slurm, a batch script for one task", {"WORLD_SIZE": "4"}, "Received: WORLD_SIZE=4 without RANK and MASTER"),
        ("Slurm, a batch script for one task", {"TFDIST_PS": "1"}, "start it by srun or mpirun, or by `tfdist run"),
        (
            "PBS on one host",
            {"PBS_NODEFILE": "/does/not/exist"},
            "Received: PBS_NODEFILE=/does/not/exist, which cannot be read (No such file or directory). Expected: the",
        ),
        ("Grid Engine on one host", {"PE_HOSTFILE": "/does/not/exist"}, "Received: PE_HOSTFILE=/does/not/exist, which"),
        # A step of several components in a plain job: the list of nodes is sorted.
        (
            "Slurm",
            {"SLURM_PROCID": "0", "SLURMD_NODENAME": "n11"},
            "expected it on n9, the first one. Set TFDIST_MEETING to the name of its host, n11, on all",
        ),
        ("Volcano with the plugin svc", {"HOSTNAME": "mine"}, "Received: the pod mine of a Volcano job. Expected: one"),
        ("SageMaker", {"SM_HOSTS": "algo-1"}, "expected a JSON list with SM_CURRENT_HOST, 'algo-2'"),
        ("Kubernetes Indexed Job", {"TFDIST_SIZE": ""}, 'the value of "completions"'),
        (
            "Kubernetes StatefulSet",
            {"TFDIST_SIZE": " "},
            "received the pod train-1, one of several, without the number",
        ),
        ("Vertex AI", {"CLUSTER_SPEC": "{}"}, '"cluster" or "task" is missing'),
        (
            "Vertex AI",
            {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}, "task": {"type": "workerpool0"}}'},
            "CLUSTER_SPEC: the task index is None; use a whole number from 0",
        ),
    ],
)
def test_mistakes_are_named(name, changes, said):
    with pytest.raises(ClusterError) as caught:
        find({**DUMPS[name].env, **changes})
    assert said in str(caught.value)


def test_dynamic_workers_know_the_parameter_servers():
    config = discover(DUMPS["Kubeflow TFJob with dynamic workers"].env)
    assert config.jobs == {"worker": {1: "job-worker-1.ns.svc:2222"}, "ps": {0: "job-ps-0.ns.svc:2222"}}
    assert (config.task_type, config.task_index) == ("worker", 1)


def test_sagemaker_without_its_toolkit(tmp_path, monkeypatch):
    path = tmp_path / "resourceconfig.json"
    monkeypatch.setattr("tfdist.cluster.environments._RESOURCES", path)
    env = {"TRAINING_JOB_NAME": "digits"}
    assert find(env).is_single_process, "there is no such file elsewhere"
    path.write_text('{"current_host": "algo-2", "hosts": ["algo-1", "algo-2"], "network_interface_name": "eth0"}')
    found = find(env)
    assert (found.rank, found.size, found.host, found.own_name) == (1, 2, "algo-1", "algo-2")
    assert find({**env, "SM_CURRENT_HOST": "algo-2"}) == found


def test_the_main_node_of_aws_batch_meets_the_others_on_its_host():
    env = {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0", "AWS_BATCH_JOB_MAIN_NODE_INDEX": "0"}
    assert (find(env).rank, find(env).host) == (0, "localhost")
