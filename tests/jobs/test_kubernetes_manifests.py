"""The manifests: valid for every Kubernetes that has what they use, and with what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import hypothesis
import kubernetes_validate
import pytest
import yaml
from hypothesis import strategies as st

from tfdist.jobs.engine import engine_of
from tfdist.jobs.kubernetes import as_label, manifests
from tfdist.jobs.record import Records
from tfdist.jobs.request import Request
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


def test_what_is_made_of_all_options() -> None:
    """Each line of the file is meant as it is: exit codes, rights, the name under which pods find each other."""
    found = json.loads(json.dumps(made(**FULL)))
    (container,) = found[2]["spec"]["template"]["spec"]["containers"]
    # Without the defaults of TensorFlow and the C library.
    container["env"] = [one for one in container["env"] if one["name"].startswith(("A", "TFDIST_"))]
    assert found == list(yaml.safe_load_all(Path(__file__).with_name("kubernetes_job.yaml").read_text()))


def test_a_default_is_not_set_beside_the_users_value() -> None:
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


@pytest.mark.parametrize(
    ("name", "label"),
    [
        *[("Train_digits.v2", "train-digits-v2-x1"), ("3d", "job-3d-x1"), ("___", "job-x1"), ("a-", "a-x1")],
        # With the hyphen and the index of a pod, it is the host name of that.
        ("a" * 99, "a" * 54 + "-x1"),
    ],
)
def test_names_are_made_so_that_kubernetes_allows_them(name: str, label: str) -> None:
    assert as_label(name, "x1") == label and len(label) <= 63 - len("-99999")


def test_a_dry_run_prints_what_kubectl_takes(tmp_path) -> None:
    request = Request("kubernetes", TARGET, image="registry/train:1")
    printed = json.loads(engine_of("kubernetes", Records(tmp_path / "jobs")).dry_run(request))
    objects = printed["items"]
    assert (printed["apiVersion"], printed["kind"]) == ("v1", "List")
    assert [one["kind"] for one in objects] == ["Secret", "Service", "Job"]
    assert len({one["metadata"]["name"] for one in objects}) == 1
    assert objects[0]["stringData"] == {"token": "SECRET"}
    assert not (tmp_path / "jobs").exists()
