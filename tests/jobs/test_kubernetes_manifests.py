"""The manifests: valid for every Kubernetes that has what they use, and with what was asked for."""

from __future__ import annotations

import sys

import hypothesis
import kubernetes_validate
import pytest
import yaml
from hypothesis import strategies as st

from tfdist.jobs.engine import engine_of
from tfdist.jobs.kubernetes.manifests import as_label, checked_name, manifests
from tfdist.jobs.record import Records
from tfdist.jobs.request import Request, SubmitError
from tfdist.launcher.arguments import Target

TARGET = Target("script", ("train.py", "--epochs", "3"))
# Since then podFailurePolicy is stable; Indexed Jobs were before.
VERSIONS = ("1.31", kubernetes_validate.latest_version())
PLAIN: dict = {}
FULL = {
    **{"workers": 4, "ps": 2, "cpus_per_worker": 2, "gpus_per_worker": 1, "time_limit": 7200, "pack": True},
    **{"max_restarts": 2, "grace": 90, "env": {"A": "1"}, "volumes": {"backups": "/backups", "data": "/data"}},
}


def made(name: str = "train", **options) -> list[dict]:
    return manifests(Request("kubernetes", TARGET, image="registry/train:1", **options), name, "s3cret")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [PLAIN, FULL], ids=["plain", "full"])
def test_they_are_valid(version: str, options: dict) -> None:
    for manifest in made(**options):
        assert kubernetes_validate.validate(manifest, version, strict=True) == ".".join(version.split(".")[:2])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_validation_finds_mistakes(version: str) -> None:
    job = made()[2]
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="onExitCode"):
        kubernetes_validate.validate(job, version, strict=True)


def test_the_job() -> None:
    job = made(**FULL)[2]
    spec = job["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (7, 7, "Indexed")
    assert (spec["backoffLimit"], spec["activeDeadlineSeconds"]) == (14, 7200)
    assert spec["podFailurePolicy"]["rules"] == [
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [77]}},
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [78]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"], pod["terminationGracePeriodSeconds"]) == ("Never", "train", 90)
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] == 1000
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-u", "train.py", "--epochs", "3"]
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["resources"] == {kind: {"cpu": "2", "nvidia.com/gpu": "1"} for kind in ("limits", "requests")}
    assert container["volumeMounts"] == [
        {"name": "volume-0", "mountPath": "/backups"},
        {"name": "volume-1", "mountPath": "/data"},
    ]
    assert [volume["persistentVolumeClaim"]["claimName"] for volume in pod["volumes"]] == ["backups", "data"]
    (term,) = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    assert (
        term["podAffinityTerm"]["labelSelector"]["matchLabels"].items()
        <= spec["template"]["metadata"]["labels"].items()
    )


def test_what_the_processes_are_told() -> None:
    (container,) = made(**FULL)[2]["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in container["env"]}
    assert (env["TFDIST_SIZE"], env["TFDIST_PS"], env["A"], env["TFDIST_EVENT_LOG"]) == ("7", "2", "1", "-")
    assert env["TFDIST_TOKEN"] == {"secretKeyRef": {"name": "train", "key": "token"}}
    # The name must not be set twice, by the user and by default.
    (container,) = made(env={"TF_CPP_MIN_LOG_LEVEL": "0"})[2]["spec"]["template"]["spec"]["containers"]
    assert [entry["value"] for entry in container["env"] if entry["name"] == "TF_CPP_MIN_LOG_LEVEL"] == ["0"]


def expanded(text: str, variables: dict[str, str]) -> str:
    """What a kubelet makes of a command's word or a variable's value: expand.go of Kubernetes."""
    result, at = "", 0
    while at < len(text):
        if text[at] != "$" or at + 1 == len(text):
            result, at = result + text[at], at + 1
        elif text[at + 1] == "(" and (end := text.find(")", at)) > 0:
            name = text[at + 2 : end]
            result, at = result + variables.get(name, f"$({name})"), end + 1
        else:
            # "$$" becomes "$"; everything else stays.
            result, at = result + ("$" if text[at + 1] == "$" else text[at : at + 2]), at + 2
    return result


@hypothesis.given(st.text("$()AB x", max_size=12), st.text("$()AB x", max_size=12))
@hypothesis.example("pa$$word", "$(TFDIST_TOKEN)")
def test_what_was_typed_arrives_as_it_was(value: str, word: str) -> None:
    request = Request("kubernetes", Target("script", ("train.py", word)), image="registry/train:1", env={"P": value})
    (container,) = manifests(request, "train", "s3cret")[2]["spec"]["template"]["spec"]["containers"]
    variables = {"TFDIST_TOKEN": "s3cret", "A": "1", "B": "2"}
    assert expanded(container["command"][-1], variables) == word
    assert [expanded(one["value"], variables) for one in container["env"] if one["name"] == "P"] == [value]


def test_discovery_understands_the_environment_of_a_pod() -> None:
    from tfdist.cluster.discovery import find

    (container,) = made(workers=3)[2]["spec"]["template"]["spec"]["containers"]
    env = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "2", "HOSTNAME": "train-2"}
    found = find({**env, **pod, "TFDIST_HOST": "train-2.train"})
    assert (found.rank, found.size, found.host) == (2, 3, "train-0.train")


def test_what_is_not_asked_for_is_not_there() -> None:
    spec = made()[2]["spec"]
    pod = spec["template"]["spec"]
    assert spec["backoffLimit"] == 6
    assert {"activeDeadlineSeconds"} & set(spec) == set()
    assert {"affinity", "volumes"} & set(pod) == set()
    assert {"resources", "volumeMounts"} & set(pod["containers"][0]) == set()


def test_the_service_gives_names_to_these_pods_before_they_are_ready() -> None:
    secret, service, job = made()
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert secret["stringData"] == {"token": "s3cret"}
    assert "s3cret" not in str(job)


@pytest.mark.parametrize("name", ["Train", "1train", "-a", "a-", "a_b", "a.b", "", "a" * 62])
def test_names_that_kubernetes_does_not_allow(name: str) -> None:
    with pytest.raises(SubmitError, match=rf"Received: --name '{name}'.* Expected: a DNS label of at most 61"):
        checked_name(name, 4)


def test_names_that_it_allows() -> None:
    assert checked_name("a" * 61, 10) == "a" * 61
    with pytest.raises(SubmitError, match="at most 60"):
        checked_name("a" * 61, 11)
    assert [as_label(name, "x1") for name in ("Train_digits.v2", "3d", "___")] == [
        *("train-digits-v2-x1", "job-3d-x1", "job-x1"),
    ]


def test_a_dry_run_prints_what_kubectl_takes(tmp_path) -> None:
    request = Request("kubernetes", TARGET, image="registry/train:1")
    text = engine_of("kubernetes", Records(tmp_path / "jobs")).dry_run(request)
    documents = list(yaml.safe_load_all(text))
    assert [document["kind"] for document in documents] == ["Secret", "Service", "Job"]
    assert len({document["metadata"]["name"] for document in documents}) == 1
    assert "&id" not in text
    assert documents[0]["stringData"] == {"token": "SECRET"}
    assert not (tmp_path / "jobs").exists()


def test_without_the_extra_it_is_named(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("kubernetes", TARGET, image="registry/train:1")
    engine = engine_of("kubernetes", Records(tmp_path / "jobs"))
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(SubmitError, match=r"without the package PyYAML .* pip install kubernetes PyYAML"):
        engine.dry_run(request)
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(SubmitError, match=r"without the package kubernetes .* pip install kubernetes PyYAML"):
        engine.submit(request)
