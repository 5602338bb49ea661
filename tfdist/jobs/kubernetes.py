"""Kubernetes, by kubectl: an Indexed Job with a headless Service and a Secret.

References:
    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    https://kubernetes.io/docs/tasks/job/pod-failure-policy/
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import secrets
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tfdist.cluster.foreign_text import cleaned
from tfdist.jobs.engine import Engine, answer
from tfdist.jobs.record import Record
from tfdist.jobs.request import Request, SubmitError, UnansweredError
from tfdist.jobs.status import FAILED, LOST, QUEUED, RUNNING, SUCCEEDED, Progress, Status, last_progress
from tfdist.launcher.arguments import Target
from tfdist.supervision.events import STANDARD_OUTPUT, events_in, without_event
from tfdist.supervision.events import VARIABLE as EVENT_LOG
from tfdist.supervision.exit_codes import PREEMPTED, REFUSED

Json = dict[str, Any]
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
# What kubectl says when nothing was done; after anything else the cluster may have done it.
_REFUSED = re.compile(r"\((?:Unauthorized|Forbidden|NotFound|AlreadyExists|BadRequest)\)| is invalid|^error: ")
_LOG_LINE = re.compile(r"[EIW]\d{4} ")
_INDEX = "batch.kubernetes.io/job-completion-index"
# Seconds between two looks at the pods; and after which the output of a pod is read again, if it has ended while the
# pod still runs.
_WAIT, _PATIENCE = 1.0, 3
# The newest progress is searched in this many lines at the end of the chief's output.
_LAST_LINES = 500
_OVER = {"Complete": SUCCEEDED, "Failed": FAILED}
# User and group of docker/Dockerfile. Files that are written to volumes belong to this group.
USER = 1000
INSTANCE = "app.kubernetes.io/instance"
_TOKEN_KEY = "token"
# The host name of a pod is that of the Job with the pod's index, and a DNS label.
_LONGEST = 63


class KubernetesEngine(Engine):
    """Creates jobs in the cluster and the namespace of the current context of kubectl's configuration."""

    def dry_run(self, request: Request) -> str:
        """The manifests, as `kubectl apply -f` takes them, with a word in place of the secret."""
        objects = manifests(request, _name(request), "SECRET")
        return json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"

    def submit(self, request: Request) -> Record:
        """Creates Secret, Service and Job, the Job last: its pods need the others."""
        name = _name(request)
        with self._recorded(request, job=name, grace=request.grace, **_current()) as record:
            try:
                for one in manifests(request, name, secrets.token_hex(32)):
                    _kubectl(record, "create", "--validate=false", "-f", "-", content=one)
            except UnansweredError:
                raise
            except SubmitError:
                with contextlib.suppress(SubmitError):
                    _delete(record)
                raise
        return record

    def _ask(self, record: Record) -> Status:
        """The state of the Job and its pods."""
        job = _kubectl(record, "get", "job", record.details["job"], "--ignore-not-found", "--output=json")
        if not job:
            where = " ".join(_where(record))
            return Status(LOST, f"there is no Job {record.details['job']} {where}: deleted, or never created")
        return status_of(json.loads(job), _pods(record))

    def _end(self, record: Record, now: Status, again: bool) -> str:
        _delete(record)
        return f"deleted; its pods get SIGTERM, and have {record.details['grace']} s to save their state"

    def progress(self, record: Record) -> Progress | None:
        """The progress in the chief's output, which contains its event log."""
        chief = chief_of(_pods(record))
        if chief is None or _phase(chief) == "Pending":
            return None
        return last_progress(events_in(_kubectl(record, "logs", chief["metadata"]["name"], f"--tail={_LAST_LINES}")))

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """The output of the chief; with `follow`, also that of the next chief after a restart."""
        shown, cut_off = None, 0.0
        while True:
            chief = chief_of(_pods(record))
            started = chief is not None and _phase(chief) != "Pending"
            again = started and chief["metadata"]["uid"] == shown
            # If the output of a running pod ends, either the pod is ending, or something between us closed the
            # connection. After a while it can only be the connection: read again what came since.
            silent = int(time.monotonic() - cut_off) if again else None
            if started and (not again or (_phase(chief) == "Running" and silent >= _PATIENCE)):
                more = [] if silent is None else [f"--since={silent}s"]
                _copy([chief["metadata"]["name"], *more, *(["-f"] if follow else []), *_where(record)], to)
                shown, cut_off = chief["metadata"]["uid"], time.monotonic()
            if not follow or self.status(self.records.load(record.id)).is_over:
                return
            time.sleep(_WAIT)


def _pods(record: Record) -> list[Json]:
    return json.loads(
        _kubectl(record, "get", "pods", f"--selector={INSTANCE}={record.details['job']}", "--output=json")
    )["items"]


def _delete(record: Record) -> None:
    """Deletes all objects of a job, and with the Job its pods, which get SIGTERM."""
    names = (f"{kind}/{record.details['job']}" for kind in ("job", "service", "secret"))
    _kubectl(record, "delete", *names, "--ignore-not-found", "--wait=false")


def _name(request: Request) -> str:
    return as_label(request.name, secrets.token_hex(3))


def _where(record: Record) -> list[str]:
    context = record.details["context"]
    return [f"--namespace={record.details['namespace']}", *([f"--context={context}"] if context else [])]


def _current() -> dict[str, str | None]:
    """Context and namespace of kubectl; in a pod without a configuration, those of its service account."""
    done = answer(["kubectl", "config", "view", "--minify", "--output=json"])
    if done.returncode == 0:
        found = json.loads(done.stdout)
        namespace = found["contexts"][0]["context"].get("namespace", "default")
        return {"context": found["current-context"], "namespace": namespace}
    try:
        return {"context": None, "namespace": _OWN_NAMESPACE.read_text().strip()}
    except OSError:
        raise SubmitError(
            f"Received: no configuration of a Kubernetes cluster ({cleaned(done.stderr.strip())}). Expected: that "
            "`kubectl get jobs` works"
        ) from None


def _kubectl(record: Record, *words: str, content: Json | None = None) -> str:
    """The output of kubectl in a job's context and namespace.

    Raises:
        SubmitError: it is not installed, the cluster refuses or, as an UnansweredError, may have done it all the same.
    """
    command = ["kubectl", *words, *_where(record), "--request-timeout=30s"]
    done = answer(command, json.dumps(content) if content else "")
    if done.returncode == 0:
        return done.stdout
    said = cleaned(" ".join(line for line in done.stderr.splitlines() if not _LOG_LINE.match(line)))
    kind = SubmitError if _REFUSED.search(said) else UnansweredError
    where = record.details["namespace"]
    raise kind(f"Received: from kubectl {words[0]} in {where}: {said}. Expected: that the cluster does it")


def _copy(words: list[str], to: BinaryIO) -> None:
    """Writes the output of a pod line by line as it comes, without its events."""
    with subprocess.Popen(["kubectl", "logs", *words], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                to.write(without_event(line.rstrip(b"\n")))
                to.flush()
        finally:
            process.terminate()


def status_of(job: Json, pods: Sequence[Json]) -> Status:
    """The state of a Job with these pods."""
    now = job.get("status", {})
    started = _time(now.get("startTime"))
    for condition in now.get("conditions", ()):
        if condition["type"] in _OVER and condition["status"] == "True":
            state, ended = _OVER[condition["type"]], _time(condition.get("lastTransitionTime"))
            return Status(state, _why(condition) if state == FAILED else "", started, ended)
    if not pods:
        return Status(QUEUED, "no pod yet")
    waiting = [pod for pod in pods if _phase(pod) == "Pending"]
    why = _obstacle(waiting)
    if waiting and "Running" not in map(_phase, pods):
        return Status(QUEUED, why)
    if waiting:
        detail = f"{len(waiting)} of {job['spec']['completions']} pods wait{f': {why}' if why else ''}"
        return Status(RUNNING, detail, started)
    return Status(RUNNING, f"{now['failed']} pods have failed" if now.get("failed") else "", started)


def chief_of(pods: Sequence[Json]) -> Json | None:
    """The newest pod with index 0; older ones are left from earlier attempts."""
    found = [pod for pod in pods if pod["metadata"].get("annotations", {}).get(_INDEX) == "0"]
    return max(found, key=lambda pod: pod["metadata"]["creationTimestamp"], default=None)


def _phase(pod: Json) -> str:
    return pod.get("status", {}).get("phase", "")


def _time(text: str | None) -> float | None:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else None


def _why(found: Json) -> str:
    """A reason and its message, which anybody with rights in the cluster may have written."""
    return cleaned(": ".join(found[part] for part in ("reason", "message") if found.get(part)))


def _obstacle(pods: Sequence[Json]) -> str:
    """Why pods wait: an image that cannot be pulled, or no node with room for them."""
    for pod in pods:
        for container in pod["status"].get("containerStatuses", ()):
            waiting = container.get("state", {}).get("waiting", {})
            if waiting.get("reason", "ContainerCreating") != "ContainerCreating":
                return _why(waiting)
        for condition in pod["status"].get("conditions", ()):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return cleaned(condition.get("message") or condition.get("reason", ""))
    return ""


def manifests(request: Request, name: str, token: str) -> list[dict[str, Any]]:
    """The Secret, the Service and the Job.

    Args:
        request: what was asked for.
        name: of all three; see `as_label`.
        token: the secret of this job's processes.

    Example:
        >>> request = Request("kubernetes", Target("script", ("train.py",)), image="registry/train:1")
        >>> [one["kind"] for one in manifests(request, "train", "secret")]
        ['Secret', 'Service', 'Job']
    """
    labels = {INSTANCE: name, "app.kubernetes.io/managed-by": "tfdist"}
    meta = {"name": name, "labels": labels}
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "type": "Opaque", "stringData": {_TOKEN_KEY: token}},
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": meta,
            # Headless: it gives each pod a DNS name. The pods need the names to find each other before they are ready.
            "spec": {"clusterIP": "None", "selector": {INSTANCE: name}, "publishNotReadyAddresses": True},
        },
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": _job(request, name, labels)},
    ]


def as_label(name: str, suffix: str) -> str:
    """A name that Kubernetes allows, made from the name of a job. It is the Service's, too: it begins with a letter.

    Example:
        >>> as_label("Train_digits", "x7k2p")
        'train-digits-x7k2p'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"job-{plain}"
    return f"{plain[: _LONGEST - len('--99999') - len(suffix)].rstrip('-')}-{suffix}"


def _asked_for(**fields: Any) -> dict[str, Any]:
    """The fields that have a value."""
    return {name: value for name, value in fields.items() if value}


def _job(request: Request, name: str, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "completions": request.tasks,
        "parallelism": request.tasks,
        "completionMode": "Indexed",
        # When one process fails, all others fail too: each restart counts once for each process.
        "backoffLimit": request.max_restarts * request.tasks,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [PREEMPTED]}},
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [REFUSED]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"metadata": {"labels": dict(labels)}, "spec": _pod(request, name)},
        **_asked_for(activeDeadlineSeconds=request.time_limit),
    }


def _pod(request: Request, name: str) -> dict[str, Any]:
    volumes = [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, claim in enumerate(request.volumes)
    ]
    near = {"labelSelector": {"matchLabels": {INSTANCE: name}}, "topologyKey": "kubernetes.io/hostname"}
    # Preferred, not required: a job that does not fit on one host has to run, too.
    preferred = {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": near}]}
    return {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": request.grace,
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(request, name)],
        **_asked_for(volumes=volumes, affinity={"podAffinity": preferred} if request.pack else None),
    }


def _container(request: Request, name: str) -> dict[str, Any]:
    own = {
        "TFDIST_SIZE": str(request.tasks),
        # Files of a pod cannot be read from outside, so events go to its output. `tfdist logs` leaves them out.
        EVENT_LOG: STANDARD_OUTPUT,
        **request.of_all,
    }
    variables = {**request.runtime_defaults, **request.env, **own}
    token = {"name": "TFDIST_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": _TOKEN_KEY}}}
    amounts = {"cpu": request.cpus_per_worker, "nvidia.com/gpu": request.gpus_per_worker}
    limits = {resource: str(amount) for resource, amount in amounts.items() if amount}
    mounts = [{"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(request.volumes.values())]
    return {
        "name": "tfdist",
        "image": request.image,
        "command": [literal(word) for word in command_in_image(request.target)],
        "env": [*({"name": key, "value": literal(value)} for key, value in variables.items()), token],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **_asked_for(
            resources={"limits": limits, "requests": dict(limits)} if limits else None,
            volumeMounts=mounts,
        ),
    }


def literal(text: str) -> str:
    """A text as it has to be written where Kubernetes expands variables: in commands and in values of variables.

    It makes "$" of "$$", and the variable's value of "$(NAME)": a password would change, and the job's token could get
    into a command line, which all users of a host can read.

    Example:
        >>> literal("pa$$word"), literal("$(TFDIST_TOKEN)")
        ('pa$$$$word', '$$(TFDIST_TOKEN)')
    """
    return text.replace("$", "$$")


def command_in_image(target: Target) -> list[str]:
    """The argument vector that runs a program in a container, with the container's own Python.

    Example:
        >>> command_in_image(Target("script", ("train.py", "--epochs", "3")))
        ['python', '-u', 'train.py', '--epochs', '3']
    """
    return list(target.words) if target.kind == "command" else ["python", "-u", *target.typed]
