"""What is asked of Kubernetes, and what is made of its answers: the official client against a small server."""

from __future__ import annotations

import errno
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.conftest import Tfdist, wait_until
from tests.jobs.kubernetes_api import KubernetesApi
from tfdist.jobs.engine import Engine, engine_of
from tfdist.jobs.record import Records
from tfdist.jobs.request import Request, SubmitError, UnansweredError
from tfdist.launcher.arguments import Target

REQUEST = Request("kubernetes", Target("script", ("train.py",)), image="registry/train:1", name="train", grace=45)
PROGRESS = {"time": time.time(), "name": "chief", "event": "progress", "epoch": 2, "epochs": 3, "step": 4, "steps": 8}
EVENT = json.dumps(PROGRESS).encode() + b"\n"


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    with KubernetesApi() as server:
        server.configure(tmp_path / "config")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
        # The client reads that variable when it is imported.
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "config"))
        yield server


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "jobs")


@pytest.fixture
def engine(records: Records, api: KubernetesApi) -> Engine:
    return engine_of("kubernetes", records)


def set_status(api: KubernetesApi, **status) -> None:
    api.objects["jobs"]["train"]["status"] = status


def condition(kind: str, **more: str) -> dict:
    return {"type": kind, "status": "True", "lastTransitionTime": "2026-11-22T10:05:00Z", **more}


def test_submit_creates_the_three_objects(engine: Engine, api: KubernetesApi, records: Records) -> None:
    record = engine.submit(REQUEST)
    assert record.id == "kubernetes-train" and records.load(record.id) == record
    assert [(method, path.rsplit("/", 2)[1:]) for method, path, _ in api.requests] == [
        ("POST", ["research", kind]) for kind in ("jobs", "services", "secrets")
    ]
    job = api.objects["jobs"]["train"]
    for kind in ("services", "secrets"):
        (owner,) = api.objects[kind]["train"]["metadata"]["ownerReferences"]
        assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "train", "uid": job["metadata"]["uid"]}
    token = api.objects["secrets"]["train"]["stringData"]["token"]
    assert len(token) == 64 and token not in (records.folder / "kubernetes-train.json").read_text()
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "registry/train:1"


def test_names_are_made_unless_they_are_chosen(engine: Engine) -> None:
    made = [engine.submit(Request("kubernetes", REQUEST.target, image="x")).id for _ in range(3)]
    assert len(set(made)) == 3 and all(own.startswith("kubernetes-train-") for own in made)
    engine.submit(REQUEST)
    with pytest.raises(SubmitError, match=r'Received: 409 \(jobs "train" already exists\), .* choose another --name'):
        engine.submit(REQUEST)


def test_half_a_job_is_taken_back(engine: Engine, api: KubernetesApi, records: Records) -> None:
    api.refusals["POST", "secrets"] = (403, "secrets is forbidden")
    with pytest.raises(SubmitError, match=r"Received: 403 \(secrets is forbidden\).*ask for the right to create"):
        engine.submit(REQUEST)
    assert api.objects["jobs"] == {} and records.all() == []


def test_the_record_is_there_before_the_job(engine: Engine, api: KubernetesApi, records: Records) -> None:
    """The process may be killed at any moment: then the job is found by a label."""
    create = engine._create

    def killed_afterwards(*arguments):
        assert [record.id for record in records.all()] == ["kubernetes-train"]
        create(*arguments)
        raise KeyboardInterrupt

    engine._create = killed_afterwards
    with pytest.raises(KeyboardInterrupt, match="it is kept as kubernetes-train; `tfdist status kubernetes-train`"):
        engine.submit(REQUEST)
    record = records.load("kubernetes-train")
    assert record.details["uid"] is None and str(engine.status(record)) == "queued: no pod yet"
    assert engine.cancel(record).startswith("kubernetes-train: deleted") and api.objects["jobs"] == {}


def test_no_record_no_job(engine: Engine, api: KubernetesApi, records: Records, monkeypatch) -> None:
    def no_space(*arguments, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tfdist.jobs.record.write_atomically", no_space)
    with pytest.raises(OSError, match="No space left"):
        engine.submit(REQUEST)
    assert api.requests == [] and [path.name for path in records.folder.iterdir()] == [".lock"]


def test_an_answer_that_is_lost(engine: Engine, api: KubernetesApi, records: Records) -> None:
    api.refusals["POST", "jobs"] = (504, "the server took too long")
    with pytest.raises(
        SubmitError, match=r"504.*Whether the job runs is not known: it is kept as kubernetes-train; `tf"
    ):
        engine.submit(REQUEST)
    assert [method for method, _, _ in api.requests] == ["POST", "GET"]
    api.refusals["GET", "jobs"] = (503, "busy")
    with pytest.raises(SubmitError, match="Whether the job runs is not known: it is kept as kubernetes-train-2; `tfd"):
        engine.submit(REQUEST)
    assert [record.id for record in records.all()] == ["kubernetes-train", "kubernetes-train-2"]


def test_a_job_that_appears_after_the_answer_was_lost(engine: Engine, api: KubernetesApi, records: Records) -> None:
    """It is known by its label, as soon as it is there; until then its user is told what to do."""
    create, created = engine._create, {}

    def too_late(client, namespace, job, others):
        create(client, namespace, job, others)
        created.update(api.objects["jobs"].pop("train"))
        raise UnansweredError("504")

    engine._create = too_late
    with pytest.raises(SubmitError, match="it is kept as kubernetes-train"):
        engine.submit(REQUEST)
    (record,) = records.all()
    assert str(engine.status(record)) == (
        "unconfirmed: Kubernetes has not answered, and has no such job in research. It may still appear: `kubectl get "
        "job train --namespace=research --context=lab` shows it, and `tfdist cancel kubernetes-train` ends it then. If "
        f"it does not, `rm -r {records.folder}/kubernetes-train.json {record.folder}` forgets it"
    )
    with pytest.raises(SubmitError, match=r"which cannot be ended now.*It is unconfirmed: Kubernetes has not answered"):
        engine.cancel(record)
    api.objects["jobs"]["train"] = created
    assert str(engine.status(record)) == "queued: no pod yet"
    del api.objects["jobs"]["train"]
    assert engine.status(records.load(record.id)).state == "lost"


def test_half_a_job_that_was_deleted_leaves_no_record(engine: Engine, api: KubernetesApi, records: Records) -> None:
    api.refusals["POST", "secrets"] = (504, "the server took too long")
    with pytest.raises(SubmitError, match="504"):
        engine.submit(REQUEST)
    assert api.objects["jobs"] == {} and records.all() == []


def test_half_a_job_that_cannot_be_taken_back_is_kept(engine: Engine, api: KubernetesApi, records: Records) -> None:
    api.refusals["POST", "secrets"] = (403, "secrets is forbidden")
    api.refusals["DELETE", "jobs"] = (403, "deleting is forbidden")
    with pytest.raises(SubmitError, match=r"secrets is forbidden.*it is kept as kubernetes-train"):
        engine.submit(REQUEST)
    assert [str(engine.status(record)) for record in records.all()] == ["queued: no pod yet"]


def test_what_becomes_of_a_job(engine: Engine, api: KubernetesApi, records: Records) -> None:
    record = engine.submit(REQUEST)
    assert str(engine.status(record)) == "queued: no pod yet"
    unschedulable = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes: insufficient nvidia.com/gpu"}
    first = api.add_pod("train", 0, "Pending", conditions=[unschedulable])
    api.add_pod("other", 0, "Running")
    set_status(api, active=1, startTime="2026-11-22T10:00:00Z")
    assert str(engine.status(record)) == "queued: 0/3 nodes: insufficient nvidia.com/gpu"
    waiting = {"name": "tfdist", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    waiting["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    api.objects["pods"][first]["status"] = {"phase": "Pending", "containerStatuses": [waiting]}
    assert str(engine.status(record)) == "queued: ImagePullBackOff: no such image"
    api.add_pod("train", 1, "Running")
    assert engine.status(record).detail == "1 of 2 pods wait: ImagePullBackOff: no such image"
    api.objects["pods"][first]["status"] = {"phase": "Running"}
    now = engine.status(record)
    assert (now.state, now.detail, now.started) == ("running", "", 1795341600.0)
    set_status(api, active=2, failed=2, startTime="2026-11-22T10:00:00Z")
    assert engine.status(record).detail == "2 pods have failed"
    why = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
    set_status(api, failed=7, startTime="2026-11-22T10:00:00Z", conditions=[condition("Failed", **why)])
    assert str(engine.status(record)) == f"failed after 5 min: {why['reason']}: {why['message']}"
    done = [{"type": "SuccessCriteriaMet", "status": "True"}, condition("Complete")]
    set_status(api, succeeded=2, startTime="2026-11-22T10:00:00Z", conditions=done)
    assert str(engine.status(record)) == "succeeded after 5 min"
    del api.objects["jobs"]["train"]
    assert str(engine.status(record)).startswith("lost: the Job is not there any more")
    # But how it ended has been kept.
    assert str(engine.status(records.load(record.id))) == "succeeded after 5 min"


ESCAPES = "\x1b]0;title\x07\x1b[2J"


def test_what_the_cluster_says_moves_no_cursor(engine: Engine, api: KubernetesApi) -> None:
    record = engine.submit(REQUEST)
    unschedulable = {"type": "PodScheduled", "status": "False", "message": f"no {ESCAPES} node"}
    pod = api.add_pod("train", 0, "Pending", conditions=[unschedulable])
    texts = [str(engine.status(record))]
    waiting = {"name": "tfdist", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    waiting["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": f"no {ESCAPES} image"}}
    api.objects["pods"][pod]["status"] = {"phase": "Pending", "containerStatuses": [waiting]}
    texts.append(str(engine.status(record)))
    # A pod that is gone when its output is asked for.
    api.add_pod("train", 0, "Running")
    named = api.objects["pods"].popitem()[1]
    api.objects["pods"]["x"] = {**named, "metadata": {**named["metadata"], "name": f"pod{ESCAPES}"}}
    with pytest.raises(SubmitError) as missing:
        engine.progress(record)
    api.refusals["GET", "jobs"] = (403, f"jobs {ESCAPES} forbidden")
    with pytest.raises(SubmitError) as refused:
        engine.status(record)
    del api.refusals["GET", "jobs"]
    set_status(api, failed=7, conditions=[condition("Failed", reason="PodFailurePolicy", message=f"it {ESCAPES} fell")])
    texts += [str(missing.value), str(refused.value), str(engine.status(record))]
    assert [(text.isprintable(), r"\x1b]0;title\x07\x1b[2J" in text) for text in texts] == [(True, True)] * 5


def test_another_job_of_the_same_name_is_not_this_one(engine: Engine, api: KubernetesApi) -> None:
    record = engine.submit(REQUEST)
    for objects in api.objects.values():
        objects.clear()
    other = engine.submit(REQUEST)
    assert (other.id, engine.status(record).state, engine.status(other).state) == (
        "kubernetes-train-2",
        "lost",
        "queued",
    )
    engine.cancel(record)
    assert "train" in api.objects["jobs"]


def test_cancel_deletes_the_job_with_its_pods(engine: Engine, api: KubernetesApi, records: Records) -> None:
    record = engine.submit(REQUEST)
    assert engine.cancel(record).endswith("its pods get SIGTERM, and have 45 s to save their state")
    method, path, query = api.requests[-1]
    assert (method, path, query) == (
        *("DELETE", "/apis/batch/v1/namespaces/research/jobs/train"),
        {"propagationPolicy": ["Background"]},
    )
    assert str(engine.status(records.load(record.id))) == "cancelled"
    assert engine.cancel(records.load(record.id)) == "kubernetes-train: cancelled"


def test_progress_is_in_the_chiefs_output(engine: Engine, api: KubernetesApi) -> None:
    record = engine.submit(REQUEST)
    assert engine.progress(record) is None
    api.add_pod("train", 1, "Running", [EVENT.replace(b'"epoch": 2', b'"epoch": 9')])
    api.add_pod("train", 0, "Failed", [EVENT.replace(b'"epoch": 2', b'"epoch": 1')])
    newest = api.add_pod("train", 0, "Running", [b"Epoch 2/3\n3/8 - loss: 1.0", EVENT, b"4/8", None])
    progress = engine.progress(record)
    assert progress is not None and progress.shown().startswith("epoch 2/3, step 4/8")
    assert api.requests[-1][1].endswith(f"/pods/{newest}/log")
    assert set(api.requests[-1][2]) == {"tailLines"}


def test_logs_are_the_chiefs_without_events(engine: Engine, api: KubernetesApi) -> None:
    record = engine.submit(REQUEST)
    api.add_pod("train", 0, "Running", [b"Epoch 1/3\n3/8 - loss: 1.0", EVENT[:20], EVENT[20:], b"a {b}\nc", None])
    shown = io.BytesIO()
    engine.logs(record, shown, follow=False)
    assert shown.getvalue() == b"Epoch 1/3\n3/8 - loss: 1.0a {b}\nc"


def test_logs_are_followed_over_a_restart(engine: Engine, api: KubernetesApi) -> None:
    record = engine.submit(REQUEST)
    first = api.add_pod("train", 0, "Running", [b"one\n", None])
    set_status(api, active=2, startTime="2026-11-22T10:00:00Z")
    shown = io.BytesIO()
    following = threading.Thread(target=engine.logs, args=(record, shown, True), daemon=True)
    following.start()
    wait_until(lambda: shown.getvalue() == b"one\n", 10, "the first line, at once")
    api.output[first][1:] = [b"two\n", None]
    wait_until(lambda: shown.getvalue() == b"one\ntwo\n", 10, "the second line")
    api.objects["pods"][first]["status"] = {"phase": "Failed"}
    second = api.add_pod("train", 0, "Running", [b"three\n", None])
    api.output[first].pop()
    wait_until(lambda: shown.getvalue().endswith(b"three\n"), 10, "what its successor prints")
    assert following.is_alive()
    set_status(api, succeeded=2, conditions=[condition("Complete")])
    api.output[second].pop()
    following.join(10)
    assert not following.is_alive()
    assert shown.getvalue() == b"one\ntwo\nthree\n"


@pytest.mark.exhaustive
def test_a_follower_that_is_cut_off_comes_back(engine: Engine, api: KubernetesApi) -> None:
    record = engine.submit(REQUEST)
    pod = api.add_pod("train", 0, "Running", [b"one\n", None])
    set_status(api, active=2, startTime="2026-11-22T10:00:00Z")
    api.drops_streams = True
    shown = io.BytesIO()
    following = threading.Thread(target=engine.logs, args=(record, shown, True), daemon=True)
    following.start()
    wait_until(lambda: shown.getvalue() == b"one\n", 10, "the first line")
    # What it would get for the seconds since then.
    api.output[pod][:] = [b"two\n"]
    wait_until(lambda: shown.getvalue() == b"one\ntwo\n", 15, "the second line")
    logs = [query for _, path, query in api.requests if path.endswith("/log")]
    assert "sinceSeconds" not in logs[0] and 3 <= int(logs[1]["sinceSeconds"][0]) <= 10
    set_status(api, succeeded=2, conditions=[condition("Complete")])
    following.join(10)
    assert not following.is_alive()


def test_a_cluster_that_is_not_there_is_named(engine: Engine, api: KubernetesApi, tmp_path: Path) -> None:
    record = engine.submit(REQUEST)
    config = json.loads((tmp_path / "config").read_text())
    config["clusters"][0]["cluster"]["server"] = "http://127.0.0.1:1"
    (tmp_path / "config").write_text(json.dumps(config))
    with pytest.raises(SubmitError, match=r"no answer from Kubernetes, when asked to read the job train in research"):
        engine.status(record)
    (tmp_path / "config").unlink()
    with pytest.raises(SubmitError, match=r"Received: no configuration of a Kubernetes cluster .* KUBECONFIG"):
        engine.status(record)


def test_the_commands_themselves(run_tfdist: Tfdist, api: KubernetesApi, tmp_path: Path) -> None:
    env = {"KUBECONFIG": str(tmp_path / "config")}
    submit = ["submit", "--scheduler", "kubernetes", "--image", "x", "-n", "2", "--volume", "b:/backups"]
    assert run_tfdist(*submit, "--name", "train", "train.py", "--epochs", "3", **env) == "kubernetes-train"
    api.add_pod("train", 0, "Running", [b"Epoch 1/3\n", EVENT, None])
    set_status(api, active=2, startTime="2026-11-22T10:00:00Z")
    lines = run_tfdist("status", "kubernetes-train", **env).splitlines()
    assert lines[0].startswith("kubernetes-train  train  running for ") and "epoch 2/3, step 4/8" in lines[1]
    assert lines[2] == "  2 workers: train.py --epochs 3"
    assert run_tfdist("logs", "kubernetes-train", **env) == "Epoch 1/3"
    assert run_tfdist("cancel", "kubernetes-train", **env).startswith("kubernetes-train: deleted")
    assert run_tfdist("status", **env) == "kubernetes-train  train  cancelled"
    refused = run_tfdist.run("status", "--json", KUBECONFIG=str(tmp_path / "none"))
    assert json.loads(refused.stdout)[0]["state"] == "unknown"
    done = run_tfdist.run("submit", "--scheduler", "kubernetes", "train.py", **env)
    assert (done.returncode, done.stderr.count("received no image")) == (1, 1)
