"""The runtime and the TrainJob that users apply: valid, and understood by the processes in the pods."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.jobs.test_kubernetes_manifests import VERSIONS, made
from tests.unit.pages import ROOT, read
from tfdist.cluster.discovery import find

HERE = Path(__file__).parent
FOLDER = ROOT / "examples" / "kubeflow"


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def check(found: dict[str, Any]) -> None:
    """Raises an error for what the API server would refuse or drop."""
    schema = json.loads((HERE / f"{found['kind'].lower()}.schema.json").read_text())
    jsonschema.validate(found, schema)


def job_of(runtime: dict[str, Any]) -> dict[str, Any]:
    """The only Job of the runtime's JobSet."""
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"  # the controller looks for this name
    return replicated["template"]


def environments(runtime: dict[str, Any], trainjob: dict[str, Any]) -> list[dict[str, str]]:
    """What the processes of a TrainJob find in their environments.

    As Kubeflow Trainer 2.3 and JobSet make it: EnforceMLPolicy of pkg/runtime/framework/plugins/torch, and of
    trainjobstatus. What Kubernetes does is in docs/clusters/kubernetes.md.
    """
    trainer, name = trainjob["spec"]["trainer"], trainjob["metadata"]["name"]
    count = trainer.get("numNodes", runtime["spec"]["mlPolicy"]["numNodes"])
    (container,) = job_of(runtime)["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "node"
    given = {one["name"]: one.get("value", "s3cret") for one in [*container.get("env", []), *trainer.get("env", [])]}
    by_policy = {}
    if "torch" in runtime["spec"]["mlPolicy"]:
        by_policy = {
            **{"PET_NNODES": str(count), "PET_NPROC_PER_NODE": "8"},
            **{"PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": "29500"},
        }
    files = "/var/run/secrets/kubeflow/trainer"
    status = {
        "KUBEFLOW_TRAINER_SERVER_URL": "https://kubeflow-trainer-controller-manager.kubeflow-system.svc:10443/apis",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": f"{files}/ca.crt",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": f"{files}/token",
    }
    return [
        {
            **{"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": f"{name}-node-0-{index}"},
            **{"JOB_COMPLETION_INDEX": str(index), **given, **status, **by_policy},
            **({"PET_NODE_RANK": str(index)} if by_policy else {}),
        }
        for index in range(count)
    ]


@pytest.mark.parametrize("name", ["runtime", "trainjob"])
def test_they_are_valid(name: str) -> None:
    check(manifest(name))


def test_the_validation_finds_mistakes() -> None:
    runtime, trainjob = manifest("runtime"), manifest("trainjob")
    runtime["spec"]["mlPolicy"]["numProcesses"] = 1
    trainjob["spec"]["trainer"]["numNodes"] = "4"
    del trainjob["spec"]["runtimeRef"]["name"]
    for broken in (runtime, trainjob):
        with pytest.raises(jsonschema.ValidationError):
            check(broken)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_of_the_runtime_is_valid(version: str) -> None:
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "train-node-0"}}
    job["spec"] = copy.deepcopy(job_of(manifest("runtime"))["spec"])
    kubernetes_validate.validate(job, version, strict=True)
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="onExitCode"):
        kubernetes_validate.validate(job, version, strict=True)


def test_it_is_the_job_that_tfdist_submit_makes() -> None:
    """But for what is of one job: its size, its pods' names, and what was asked for."""
    spec, submitted = job_of(manifest("runtime"))["spec"], made()[2]["spec"]
    assert {name: spec[name] for name in ("completionMode", "podFailurePolicy")} == {
        name: submitted[name] for name in ("completionMode", "podFailurePolicy")
    }
    pod, of_submitted = spec["template"]["spec"], submitted["template"]["spec"]
    for name in ("restartPolicy", "automountServiceAccountToken", "securityContext"):
        assert pod[name] == of_submitted[name]
    assert pod["containers"][0]["securityContext"] == of_submitted["containers"][0]["securityContext"]


def test_the_labels_by_which_the_controller_finds_the_job() -> None:
    assert job_of(manifest("runtime"))["metadata"]["labels"] == {
        "trainer.kubeflow.org/trainjob-ancestor-step": "trainer"
    }
    assert manifest("trainjob")["spec"]["runtimeRef"]["name"] == manifest("runtime")["metadata"]["name"]


def test_every_pod_finds_its_cluster() -> None:
    found = [find(env) for env in environments(manifest("runtime"), manifest("trainjob"))]
    assert [(one.rank, one.size, one.host) for one in found] == [(rank, 4, "train-node-0-0.train") for rank in range(4)]
    assert {one.source for one in found} == {"Kubeflow Trainer"}
    assert len({one.job for one in found}) == 1


def test_another_trainjob_is_told_apart_and_one_of_one_pod_is_alone() -> None:
    trainjob = manifest("trainjob")
    trainjob["metadata"]["name"] = "other"
    trainjob["spec"]["trainer"]["numNodes"] = 2
    here, there = environments(manifest("runtime"), manifest("trainjob")), environments(manifest("runtime"), trainjob)
    assert find(here[0]).job != find(there[0]).job
    del trainjob["spec"]["trainer"]["numNodes"]
    (alone,) = environments(manifest("runtime"), trainjob)
    assert find(alone).is_single_process


def test_a_runtime_without_the_policy_does_not_tell_how_many_there_are() -> None:
    """The reason for `torch: {}` in the runtime."""
    runtime = manifest("runtime")
    del runtime["spec"]["mlPolicy"]["torch"]
    env = environments(runtime, manifest("trainjob"))[1]
    with pytest.raises(ValueError, match="without the number of pods"):
        find(env)
    found = find({**env, "TFDIST_SIZE": "4", "TFDIST_HOST": "train-node-0-1.train"})
    assert (found.rank, found.size, found.host) == (1, 4, "train-node-0-0.train")


def test_the_page_shows_the_trainjob_that_is_tested() -> None:
    page = read("docs/clusters/kubeflow.md")
    assert f"```yaml\n{(FOLDER / 'trainjob.yaml').read_text()}```\n" in page
