"""What is asked of Kubernetes, and what is made of its answers."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.launcher.conftest import wait_until
from tfdist.jobs import command
from tfdist.jobs.engine import Engine, engine_of
from tfdist.jobs.kubernetes import status_of
from tfdist.jobs.record import Records
from tfdist.jobs.request import Request, SubmitError
from tfdist.launcher.arguments import Target

REQUEST = Request("kubernetes", Target("script", ("train.py",)), image="registry/train:1", name="train", grace=45)
PROGRESS = {"time": time.time(), "name": "chief", "event": "progress", "epoch": 2, "epochs": 3, "step": 4, "steps": 8}
EVENT = json.dumps(PROGRESS) + "\n"
CONFIG = {"current-context": "lab", "contexts": [{"name": "lab", "context": {"namespace": "research"}}]}
SINCE = "2026-11-22T10:00:00Z"


class Cluster:
    """Stands in for kubectl: keeps objects, and answers as kubectl 1.32 does."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], dict] = {}
        self.refusals: dict[tuple[str, str], str] = {}
        self.output: dict[str, str] = {}
        self.calls: list[str] = []
        self.ended: set[str] = set()

    def add_pod(self, job: str, index: int, phase: str, output: str = "") -> str:
        """A pod of a job, as its controller makes them."""
        number = len(self.output)
        name, made = f"{job}-{index}-{number}", f"2026-11-22T10:00:{number:02}Z"
        labels, notes = {"app.kubernetes.io/instance": job}, {"batch.kubernetes.io/job-completion-index": str(index)}
        meta = {"uid": name, "name": name, "labels": labels, "annotations": notes, "creationTimestamp": made}
        self.objects["pod", name] = {"metadata": meta, "status": {"phase": phase}}
        self.output[name] = output
        return name

    def names(self) -> list[str]:
        """The kinds of the objects, without pods."""
        return [kind for kind, _ in self.objects if kind != "pod"]

    def answer(self, command: list[str], content: str = "") -> subprocess.CompletedProcess[str]:
        _, verb, *words = command
        self.calls.append(" ".join(command[1:]))
        assert verb == "config" or {"--namespace=research", "--context=lab"} <= {*words}
        plain, given = [word for word in words if not word.startswith("-")], json.loads(content or "{}")
        kind = given.get("kind", "").lower() or ("pod" if verb == "logs" else plain[0].partition("/")[0].rstrip("s"))
        if (verb, kind) in self.refusals:
            return subprocess.CompletedProcess(command, 1, "", self.refusals[verb, kind])
        said = ""
        if verb == "config":
            said = json.dumps(CONFIG)
        elif verb == "create":
            self.objects[kind, given["metadata"]["name"]] = given
        elif verb == "delete":
            self.objects = {key: one for key, one in self.objects.items() if "/".join(key) not in plain}
        elif verb == "logs":
            said = self.output[plain[0]]
        elif plain[1:]:
            assert "--ignore-not-found" in words
            found = self.objects.get((kind, plain[1]))
            said = json.dumps(found) if found else ""
        else:
            (label,) = (word.rpartition("=")[2] for word in words if word.startswith("--selector="))
            items = [
                one for (kind, name), one in self.objects.items() if kind == "pod" and name.startswith(f"{label}-")
            ]
            said = json.dumps({"items": items})
        return subprocess.CompletedProcess(command, 0, said, "")

    def popen(self, command: list[str], stdout: int) -> contextlib.AbstractContextManager:
        self.calls.append(" ".join(command[1:]))
        return contextlib.nullcontext(SimpleNamespace(stdout=self._lines(command), terminate=lambda: None))

    def _lines(self, command: list[str]) -> Iterator[bytes]:
        """The lines of a pod, until its end if it is followed."""
        name, at, is_over = command[2], 0, False
        while not is_over:
            is_over = "-f" not in command or name in self.ended
            lines = self.output[name].encode().splitlines(keepends=True)
            yield from lines[at:]
            at = len(lines)
            time.sleep(0.02)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr("tfdist.jobs.kubernetes.answer", made.answer)
    monkeypatch.setattr("tfdist.jobs.kubernetes.subprocess.Popen", made.popen)
    return made


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "jobs")


@pytest.fixture
def engine(records: Records, cluster: Cluster) -> Engine:
    return engine_of("kubernetes", records)


def condition(kind: str, **more: str) -> dict:
    return {"type": kind, "status": "True", "lastTransitionTime": "2026-11-22T10:05:00Z", **more}


def test_submit_creates_the_three_objects(engine: Engine, cluster: Cluster, records: Records) -> None:
    record = engine.submit(REQUEST)
    assert record.id == "kubernetes-1" and records.load(record.id) == record
    assert [call.split()[0] for call in cluster.calls] == ["config", "create", "create", "create"]
    name = record.details["job"]
    job, secret = cluster.objects["job", name], cluster.objects["secret", name]
    token = secret["stringData"]["token"]
    assert len(token) == 64 and token not in Path(record.folder, "job.json").read_text()
    # All users of a host can read command lines.
    assert token not in "".join(cluster.calls)
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "registry/train:1"
    assert name.startswith("train-") and engine.submit(REQUEST).details["job"] != name


FORBIDDEN = 'Error from server (Forbidden): error when creating "STDIN": secrets is forbidden'
TIMEOUT = 'Error from server (Timeout): error when creating "STDIN": the server took too long'
REFUSED = "The connection to the server 10.0.0.1 was refused - did you specify the right host or port?"
LOGGED = f'E1127 22:03:00.795063    6042 memcache.go:265] "Unhandled Error" err="x"\n{REFUSED}'
INVALID = 'The Job "train" is invalid: spec.completions: Invalid value: -1'


@pytest.mark.parametrize(
    ("kind", "text", "says", "is_kept"),
    [
        ("secret", FORBIDDEN, r"secrets is forbidden\. Expected: that the cluster does it", False),
        ("job", INVALID, r"Invalid value: -1\. Expected", False),
        ("job", "error: You must be logged in to the server (Unauthorized)", "be logged in", False),
        ("job", 'error: context "lab" does not exist', 'context "lab" does not exist', False),
        ("job", LOGGED, rf"Received: from kubectl create in research: {REFUSED[:-1]}.*`tfdist status kubernetes", True),
        ("job", TIMEOUT, r"took too long.*Whether the job runs is not known: `tfdist status kubernetes-1` shows", True),
    ],
)
def test_a_job_that_is_refused(
    engine: Engine, cluster: Cluster, records: Records, kind: str, text: str, says: str, is_kept: bool
) -> None:
    cluster.refusals["create", kind] = text
    with pytest.raises(SubmitError, match=says):
        engine.submit(REQUEST)
    # What its pods would need stays if it may appear.
    assert cluster.names() == ["secret", "service"] * is_kept and len([*records.folder.iterdir()]) == is_kept


def test_the_record_is_there_before_the_job(engine: Engine, cluster: Cluster, records: Records, monkeypatch) -> None:
    """The process may be killed at any moment: then the job is found by its name."""

    def killed_afterwards(*arguments, content):
        assert [record.id for record in records.all()[0]] == ["kubernetes-1"]
        kubectl_of_tfdist(*arguments, content=content)
        if content["kind"] == "Job":
            raise KeyboardInterrupt

    from tfdist.jobs import kubernetes as module

    kubectl_of_tfdist = module._kubectl
    with monkeypatch.context() as patched:
        patched.setattr(module, "_kubectl", killed_afterwards)
        with pytest.raises(SubmitError, match="is not known: `tfdist status kubernetes-1` shows it"):
            engine.submit(REQUEST)
    record = records.load("kubernetes-1")
    name = record.details["job"]
    # It appears later.
    created = cluster.objects.pop(("job", name))
    expected = f"lost: there is no Job {name} --namespace=research --context=lab: deleted, or never created"
    assert str(engine.status(record)) == expected
    cluster.objects["job", name] = created
    assert str(engine.status(record)) == "queued: no pod yet"
    said = "kubernetes-1: deleted; its pods get SIGTERM, and have 45 s to save their state"
    assert (engine.cancel(record), cluster.names()) == (said, [])
    assert str(engine.status(records.load(record.id))) == "cancelled"


def pending(why: str) -> dict:
    return {"conditions": [{"type": "PodScheduled", "status": "False", "message": why}]}


def no_image(why: str) -> dict:
    return {
        "containerStatuses": [{"name": "tfdist", "state": {"waiting": {"reason": "ImagePullBackOff", "message": why}}}]
    }


BACKOFF = {"reason": "BackoffLimitExceeded", "message": "Job has reached the specified backoff limit"}
DONE = [{"type": "SuccessCriteriaMet", "status": "True"}, condition("Complete")]
# The phases of the pods, with more of their status; the status of the Job; what is made of it.
STATES: dict[str, tuple[list[tuple[str, dict]], dict, str]] = {
    "new": ([], {}, "queued: no pod yet"),
    "no node": ([("Pending", pending("0/3 nodes"))], {"active": 1, "startTime": SINCE}, "queued: 0/3 nodes"),
    "no image": ([("Pending", no_image("no such"))], {"active": 1}, "queued: ImagePullBackOff: no such"),
    "one waits": ([("Pending", {}), ("Running", {})], {"active": 2}, "running: 1 of 2 pods wait"),
    "one has no image": (
        [("Pending", no_image("x")), ("Running", {})],
        {"active": 2},
        "running: 1 of 2 pods wait: ImagePullBackOff: x",
    ),
    "it runs": ([("Running", {}), ("Running", {})], {"active": 2}, "running"),
    "some have failed": ([("Running", {})] * 2, {"active": 2, "failed": 2}, "running: 2 pods have failed"),
    "failed": (
        [],
        {"failed": 7, "startTime": SINCE, "conditions": [condition("Failed", **BACKOFF)]},
        f"failed after 5 min: {BACKOFF['reason']}: {BACKOFF['message']}",
    ),
    "succeeded": ([], {"succeeded": 2, "startTime": SINCE, "conditions": DONE}, "succeeded after 5 min"),
    "escapes": (
        [("Pending", pending("no \x1b]0;title\x07\x1b[2J node"))],
        {"active": 1},
        r"queued: no \x1b]0;title\x07\x1b[2J node",
    ),
    "escapes at its end": (
        [],
        {"failed": 7, "conditions": [condition("Failed", reason="PodFailurePolicy", message="\x1b[2J")]},
        r"failed: PodFailurePolicy: \x1b[2J",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_what_becomes_of_a_job(state: str) -> None:
    pods, status, expected = STATES[state]
    made = [{"status": {"phase": phase, **more}} for phase, more in pods]
    assert str(status_of({"status": status, "spec": {"completions": 2}}, made)) == expected


def test_how_it_ended_is_kept(engine: Engine, cluster: Cluster, records: Records) -> None:
    record = engine.submit(REQUEST)
    name = record.details["job"]
    cluster.add_pod("other", 0, "Running")
    assert str(engine.status(record)) == "queued: no pod yet"
    cluster.objects["job", name]["status"] = {"succeeded": 2, "startTime": SINCE, "conditions": DONE}
    assert str(engine.status(record)) == "succeeded after 5 min"
    del cluster.objects["job", name]
    assert str(engine.status(records.load(record.id))) == "succeeded after 5 min"


def test_what_the_cluster_refuses_moves_no_cursor(engine: Engine, cluster: Cluster) -> None:
    record = engine.submit(REQUEST)
    cluster.refusals["get", "job"] = "Error from server (Forbidden): jobs \x1b]0;title\x07 forbidden"
    with pytest.raises(SubmitError, match=r"jobs \\x1b]0;title\\x07 forbidden") as refused:
        engine.status(record)
    assert str(refused.value).isprintable()


def test_the_state_is_shown_where_the_output_cannot_be_read(
    engine: Engine, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """The chief's node may be gone, or nobody may read logs."""
    record = engine.submit(REQUEST)
    monkeypatch.setattr(engine, "progress", mock.Mock(side_effect=SubmitError("i/o timeout")))
    monkeypatch.setattr(command, "job_of", lambda *_: (record, engine))
    command._show(record.id, as_json=False)
    assert capsys.readouterr().out.splitlines()[0].endswith("queued: no pod yet")
    command._show(record.id, as_json=True)
    assert json.loads(capsys.readouterr().out)["progress"] is None


def test_progress_and_logs_are_in_the_chiefs_output(engine: Engine, cluster: Cluster) -> None:
    record = engine.submit(REQUEST)
    name = record.details["job"]
    assert engine.progress(record) is None
    cluster.add_pod(name, 1, "Running", EVENT.replace('"epoch": 2', '"epoch": 9'))
    cluster.add_pod(name, 0, "Failed", EVENT.replace('"epoch": 2', '"epoch": 1'))
    others = 'a {b}\n{"time": 3}\n{"time": 3\nc'
    newest = cluster.add_pod(name, 0, "Running", f"Epoch 2/3\n{EVENT}3/8 - loss: 1.0{EVENT}{others}")
    progress = engine.progress(record)
    assert progress is not None and progress.shown().startswith("epoch 2/3, step 4/8")
    assert cluster.calls[-1].startswith(f"logs {newest} --tail=500 ")
    shown = io.BytesIO()
    engine.logs(record, shown, follow=False)
    assert shown.getvalue().decode() == f"Epoch 2/3\n3/8 - loss: 1.0{others}\n"


@pytest.mark.nightly
def test_logs_are_followed_over_restarts_and_cut_connections(engine: Engine, cluster: Cluster) -> None:
    record, shown = engine.submit(REQUEST), io.BytesIO()
    name = record.details["job"]
    first = cluster.add_pod(name, 0, "Running", "one\n")
    following = threading.Thread(target=engine.logs, args=(record, shown, True), daemon=True)
    following.start()

    def wait_for(text: bytes) -> None:
        wait_until(lambda: shown.getvalue() == text, 60, f"{text!r} after {shown.getvalue()!r}")

    wait_for(b"one\n")
    # What it would get for the seconds since then.
    cluster.output[first] = "two\n"
    cluster.ended.add(first)
    wait_for(b"one\ntwo\n")
    logs = [call for call in cluster.calls if call.startswith("logs")]
    assert "--since" not in logs[0] and re.search(r" --since=([3-9]|\d\d+)s ", logs[1])
    cluster.objects["pod", first]["status"] = {"phase": "Failed"}
    second = cluster.add_pod(name, 0, "Running", "three\n")
    wait_for(b"one\ntwo\nthree\n")
    cluster.objects["job", name]["status"] = {"conditions": DONE}
    cluster.ended.add(second)
    following.join(60)
    assert not following.is_alive() and shown.getvalue() == b"one\ntwo\nthree\n"


def test_without_kubectl_or_its_configuration(engine: Engine, cluster: Cluster, tmp_path: Path, monkeypatch) -> None:
    cluster.refusals["config", "view"] = "error: current-context must exist"
    with pytest.raises(SubmitError, match=r"Received: no configuration of a Kubernetes cluster \(error: current-c"):
        engine.submit(REQUEST)
    monkeypatch.undo()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match=r"Received: no command kubectl on the PATH\. Expected"):
        engine.submit(REQUEST)
