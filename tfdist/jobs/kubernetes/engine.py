"""Kubernetes: an Indexed Job with a headless Service and a Secret, through the official client."""

from __future__ import annotations

import contextlib
import importlib
import json
import secrets
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from tfdist.cluster.foreign_text import cleaned
from tfdist.jobs.kubernetes.manifests import INSTANCE, SUBMISSION, as_label, checked_name, manifests
from tfdist.jobs.record import Record, Records, discard
from tfdist.jobs.request import Request, SubmitError, UnansweredError
from tfdist.jobs.status import (
    CANCELLED,
    FAILED,
    LOST,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    Progress,
    Status,
    last_progress,
)
from tfdist.jobs.unconfirmed import cannot_end, keep, kept_if_interrupted, unseen
from tfdist.supervision.events import events_in, without_event

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_REMEDIES = {
    401: "log in again, as for kubectl",
    403: "ask for the right to create, read and delete jobs, services, secrets and pods' logs in this namespace",
    409: "choose another --name, or delete that one",
    422: "correct what it names",
}
_PLACEHOLDER = "SECRET"
# Seconds that a request may take, and between two looks at the pods.
_TIMEOUT, _WAIT = 30, 1.0
# Seconds after which the output of a pod is read again, if it has ended while the pod still runs.
_PATIENCE = 3
# Seconds for which a pod that is followed may print nothing.
_SILENCE = 7 * 86400
# The newest progress is searched in this many lines at the end of the chief's output.
_LAST_LINES = 500
_OVER = {"Complete": SUCCEEDED, "Failed": FAILED}


class KubernetesEngine:
    """Creates jobs in the cluster and the namespace of the current context of kubectl's configuration.

    Args:
        records: all jobs.
    """

    def __init__(self, records: Records) -> None:
        self._records = records

    def dry_run(self, request: Request) -> str:
        """The manifests, as `kubectl apply` takes them, with a word in place of the secret."""
        yaml = load("yaml", "PyYAML")
        return yaml.safe_dump_all(manifests(request, _name(request), _PLACEHOLDER), sort_keys=False)

    def submit(self, request: Request) -> Record:
        """Creates the Job. Its Service and its Secret belong to it, and are deleted with it.

        The record is written first: whatever happens, no job runs of which nobody here knows.
        """
        client, context, namespace = connect(None)
        name, submission = _name(request), secrets.token_hex(8)
        secret, service, job = manifests(request, name, secrets.token_hex(32))
        labelled = {
            **job,
            "metadata": {**job["metadata"], "labels": {**job["metadata"]["labels"], SUBMISSION: submission}},
        }
        details = {"job": name, "namespace": namespace, "context": context, "grace": request.grace, "uid": None}
        folder = self._records.make_folder(request.name)
        try:
            record = self._records.add(request, folder, name, submission=submission, **details)
        except (SubmitError, OSError):
            discard(folder)
            raise
        try:
            with kept_if_interrupted(self._records, record):
                uid = self._create(client, namespace, labelled, [service, secret])
        except UnansweredError as error:
            self._take_back(client, record, error)
            raise
        except SubmitError:
            self._records.remove(record)
            raise
        # Without it, the Job is known by its label.
        with contextlib.suppress(SubmitError, OSError):
            record = self._records.update(record.id, lambda now: now.with_details(uid=uid))
        return record

    def _create(self, client: Any, namespace: str, job: dict[str, Any], others: list[dict[str, Any]]) -> str:
        """Creates all or nothing, and returns the Job's uid."""
        name, core = job["metadata"]["name"], client.CoreV1Api()
        with answers(f"create the job {name} in {namespace}"):
            made = client.BatchV1Api().create_namespaced_job(namespace, job, _request_timeout=_TIMEOUT)
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made.metadata.uid}
        try:
            with answers(f"create the Service and the Secret of {name} in {namespace}"):
                for body in others:
                    create = getattr(core, f"create_namespaced_{body['kind'].lower()}")
                    owned = {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}
                    create(namespace, owned, _request_timeout=_TIMEOUT)
        except SubmitError as error:
            # Without them, its pods would wait forever.
            try:
                self._delete(client, name, namespace)
            except SubmitError:
                raise UnansweredError(str(error)) from None
            # All that could have been created is gone: there is nothing to ask for.
            raise SubmitError(str(error)) from None
        return made.metadata.uid

    def _take_back(self, client: Any, record: Record, error: SubmitError) -> None:
        """Deletes a Job that was created without an answer. Of one that is not seen, which may still be created, and of
        one that cannot be deleted the record stays.

        Raises:
            SubmitError: it stays.
        """
        found = None
        with contextlib.suppress(SubmitError), kept_if_interrupted(self._records, record):
            found = self._job(client, record)
            if found is not None:
                self._delete(client, record.details["job"], record.details["namespace"])
                self._records.remove(record)
                return
        raise SubmitError(f"{error}. {keep(self._records, record)}") from None

    def status(self, record: Record) -> Status:
        """The state of the Job and its pods. The final one is recorded, because the cluster may delete the Job."""
        if record.final is not None:
            return record.final
        client, _, namespace = connect(record)
        job = self._job(client, record)
        if job is None:
            return self._without_job(record)
        if record.details.get("uid") is None:
            # It has appeared: if it is not there later, it is gone.
            self._records.update(record.id, lambda now: now.with_details(uid=job.metadata.uid))
        found = status_of(job, self._pods(client, record, namespace))
        if found.is_over:
            self._records.remember(record, found)
        return found

    def _without_job(self, record: Record) -> Status:
        if record.details.get("cancelled"):
            return Status(CANCELLED)
        if record.details.get("uid") is None:
            name, namespace, context = (record.details[what] for what in ("job", "namespace", "context"))
            look = ["kubectl", "get", "job", name, f"--namespace={namespace}"]
            look += [f"--context={context}"] if context else []
            nowhere = f"has no such job in {namespace}"
            return unseen(self._records, record, "Kubernetes", nowhere, shlex.join(look))
        return Status(LOST, "the Job is not there any more: deleted by somebody else, or by the cluster after its end")

    def progress(self, record: Record) -> Progress | None:
        """The progress in the chief's output, which contains its event log."""
        client, _, namespace = connect(record)
        chief = chief_of(self._pods(client, record, namespace))
        if chief is None or chief.status.phase == "Pending":
            return None
        with answers(f"read the output of {chief.metadata.name}"):
            text = client.CoreV1Api().read_namespaced_pod_log(
                chief.metadata.name,
                namespace,
                tail_lines=_LAST_LINES,
                _preload_content=False,
                _request_timeout=_TIMEOUT,
            )
            return last_progress(events_in(text.data.decode(errors="replace")))

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """The output of the chief; with `follow`, also that of the next chief after a restart."""
        client, _, namespace = connect(record)
        shown, cut_off = None, 0.0
        while True:
            chief = chief_of(self._pods(client, record, namespace))
            started = chief is not None and chief.status.phase != "Pending"
            again = started and chief.metadata.uid == shown
            # If the output of a running pod ends, either the pod is ending, or something between us closed the
            # connection. After a while it can only be the connection: read again what came since.
            silent = int(time.monotonic() - cut_off) if again else None
            if started and (not again or (chief.status.phase == "Running" and silent >= _PATIENCE)):
                with answers(f"read the output of {chief.metadata.name}"):
                    _copy(client, chief.metadata.name, namespace, to, follow, silent)
                shown, cut_off = chief.metadata.uid, time.monotonic()
            if not follow or self.status(self._records.load(record.id)).is_over:
                return
            time.sleep(_WAIT)

    def cancel(self, record: Record) -> str:
        """Deletes the Job, and with it its pods, which get SIGTERM."""
        client, _, namespace = connect(record)
        if self._job(client, record) is None:
            gone = self.status(record)
            if not gone.is_over:
                raise cannot_end(record, gone)
            return f"{record.id}: {gone}"
        over = self.status(record)
        if over.is_over:
            return f"{record.id}: is over already, {over}"
        self._records.update(record.id, lambda now: now.with_details(cancelled=True))
        self._delete(client, record.details["job"], namespace)
        return f"{record.id}: deleted; its pods get SIGTERM, and have {record.details['grace']} s to save their state"

    def _job(self, client: Any, record: Record) -> Any | None:
        name, namespace = record.details["job"], record.details["namespace"]
        with answers(f"read the job {name} in {namespace}"):
            try:
                job = client.BatchV1Api().read_namespaced_job(name, namespace, _request_timeout=_TIMEOUT)
            except client.ApiException as error:
                if error.status != 404:
                    raise
                return None
        # A newer Job may have the same name.
        if record.details.get("uid") is not None:
            return job if job.metadata.uid == record.details["uid"] else None
        return job if (job.metadata.labels or {}).get(SUBMISSION) == record.details.get("submission") else None

    def _pods(self, client: Any, record: Record, namespace: str) -> list[Any]:
        selector = f"{INSTANCE}={record.details['job']}"
        with answers(f"list the pods of {record.details['job']} in {namespace}"):
            pods = client.CoreV1Api().list_namespaced_pod(namespace, label_selector=selector, _request_timeout=_TIMEOUT)
        return list(pods.items)

    def _delete(self, client: Any, name: str, namespace: str) -> None:
        with answers(f"delete the job {name} in {namespace}"):
            client.BatchV1Api().delete_namespaced_job(
                name, namespace, propagation_policy="Background", _request_timeout=_TIMEOUT
            )


def _name(request: Request) -> str:
    name = request.name if request.is_named else as_label(request.name, secrets.token_hex(2))
    return checked_name(name, request.tasks)


def _copy(client: Any, pod: str, namespace: str, to: BinaryIO, follow: bool, last: int | None) -> None:
    """Writes the output of a pod as it comes, without its events; with `last`, only that of the last seconds."""
    # While it follows a silent pod, reading must not time out; the client needs a number all the same.
    timeout = (_TIMEOUT, _SILENCE) if follow else _TIMEOUT
    since = {} if last is None else {"since_seconds": last}
    answer = client.CoreV1Api().read_namespaced_pod_log(
        pod, namespace, follow=follow, **since, _preload_content=False, _request_timeout=timeout
    )
    rest = b""
    try:
        for piece in answer.stream(amt=None):
            *lines, rest = (rest + piece).split(b"\n")
            to.write(b"".join(map(without_event, lines)))
            if b"{" not in rest:
                # Probably a progress bar, whose line does not end for long: show it now.
                to.write(rest)
                rest = b""
            to.flush()
        to.write(rest)
        to.flush()
    finally:
        answer.release_conn()


def load(module: str, package: str) -> ModuleType:
    """Imports a module of the extra "kubernetes".

    Args:
        module: name of the module.
        package: name of its package for pip.

    Raises:
        SubmitError: the package is not installed.

    Example:
        >>> load("yaml", "PyYAML").safe_dump({"a": 1})
        'a: 1\\n'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SubmitError(
            f"Received: --scheduler kubernetes without the package {package} ({error}). Expected: tfdist with its "
            "extra for Kubernetes: pip install kubernetes PyYAML"
        ) from None


def connect(record: Record | None) -> tuple[Any, str | None, str]:
    """The client, with context and namespace: those of a job, or by default the current ones.

    Raises:
        SubmitError: the client is not installed, or no cluster is configured.
    """
    kubernetes = load("kubernetes", "kubernetes")
    wanted = record.details["context"] if record else None
    problems = (kubernetes.config.ConfigException, OSError)
    try:
        kubernetes.config.load_kube_config(context=wanted)
        _, active = kubernetes.config.list_kube_config_contexts()
        context, namespace = active["name"], active["context"].get("namespace", "default")
    except problems as error:
        try:
            # In a pod, the service account is used.
            kubernetes.config.load_incluster_config()
            context, namespace = None, _OWN_NAMESPACE.read_text().strip()
        except problems:
            raise SubmitError(
                f"Received: no configuration of a Kubernetes cluster ({error}). Expected: what kubectl uses, in "
                "~/.kube/config or where KUBECONFIG says; `kubectl get jobs` has to work. --dry-run needs none"
            ) from None
    return kubernetes.client, context, record.details["namespace"] if record else namespace


@contextlib.contextmanager
def answers(what: str) -> Iterator[None]:
    """Turns errors of the client into a SubmitError, or UnansweredError where the cluster may have done it.

    Args:
        what: what the cluster is asked to do; it may hold names that the cluster has given.
    """
    what = cleaned(what)
    client = load("kubernetes.client", "kubernetes")
    http = load("urllib3", "kubernetes")
    try:
        yield
    except client.ApiException as error:
        said = error.body if isinstance(error.body, str) else error.reason
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(error.body)["message"]
        kind = UnansweredError if error.status >= 500 else SubmitError
        raise kind(
            f"Received: {error.status} ({cleaned(said)}), when asked to {what}. Expected: that the cluster does it; "
            f"{_REMEDIES.get(error.status, 'see what it says')}"
        ) from None
    except http.exceptions.HTTPError as error:
        raise UnansweredError(
            f"Received: no answer from Kubernetes, when asked to {what} ({cleaned(error)}). Expected: that the cluster "
            "of the current context is reachable; try `kubectl get jobs`"
        ) from None


def status_of(job: Any, pods: Sequence[Any]) -> Status:
    """The state of a Job with these pods."""
    started = job.status.start_time.timestamp() if job.status.start_time else None
    for condition in job.status.conditions or ():
        if condition.type in _OVER and condition.status == "True":
            ended = condition.last_transition_time.timestamp() if condition.last_transition_time else None
            state = _OVER[condition.type]
            return Status(state, _why(condition) if state == FAILED else "", started, ended)
    waiting = [pod for pod in pods if pod.status.phase == "Pending"]
    detail = f"{job.status.failed} pods have failed" if job.status.failed else ""
    if waiting and not any(pod.status.phase == "Running" for pod in pods):
        return Status(QUEUED, _obstacle(waiting))
    if not pods:
        return Status(QUEUED, "no pod yet")
    if waiting:
        detail = f"{len(waiting)} of {job.spec.completions} pods wait" + (
            f": {why}" if (why := _obstacle(waiting)) else ""
        )
    return Status(RUNNING, detail, started)


def chief_of(pods: Sequence[Any]) -> Any | None:
    """The newest pod with index 0; older ones are left from earlier attempts."""
    found = [pod for pod in pods if _index(pod) == "0"]
    return max(found, key=lambda pod: pod.metadata.creation_timestamp) if found else None


def _index(pod: Any) -> str | None:
    return (pod.metadata.annotations or {}).get("batch.kubernetes.io/job-completion-index")


def _why(condition: Any) -> str:
    """A reason and its message, which anybody with rights in the cluster may have written."""
    return cleaned(": ".join(part for part in (condition.reason, condition.message) if part))


def _obstacle(pods: Sequence[Any]) -> str:
    """Why pods wait: an image that cannot be pulled, or no node with room for them."""
    for pod in pods:
        for container in pod.status.container_statuses or ():
            if container.state and container.state.waiting and container.state.waiting.reason != "ContainerCreating":
                return _why(container.state.waiting)
        for condition in pod.status.conditions or ():
            if condition.type == "PodScheduled" and condition.status == "False":
                return cleaned(condition.message or condition.reason or "")
    return ""
