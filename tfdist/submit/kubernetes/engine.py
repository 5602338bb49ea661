"""Kubernetes as an engine, through its official client."""

from __future__ import annotations

import contextlib
import secrets
import time
from typing import Any, BinaryIO

from tfdist.submit.errors import SubmitError
from tfdist.submit.kubernetes.client import answers, connect
from tfdist.submit.kubernetes.manifests import INSTANCE, as_label, checked_name, manifests
from tfdist.submit.kubernetes.packages import load
from tfdist.submit.kubernetes.states import chief_of, status_of
from tfdist.submit.progress import Progress, last_progress, without_event
from tfdist.submit.record import Record, Records
from tfdist.submit.request import Request
from tfdist.submit.status import CANCELLED, LOST, Status

_TIMEOUT = 30
_WAIT = 1.0
_PLACEHOLDER = "SECRET"
_PATIENCE = 3
_SILENCE = 7 * 86400
# Among so many lines of the chief's output is one about its progress, if it makes any.
_LAST_LINES = 500


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
        """Creates the Job; its Service and its Secret go when it goes."""
        client, context, namespace = connect(None)
        name = _name(request)
        secret, service, job = manifests(request, name, secrets.token_hex(32))
        batch, core = client.BatchV1Api(), client.CoreV1Api()
        with answers(f"create the job {name} in {namespace}"):
            made = batch.create_namespaced_job(namespace, job, _request_timeout=_TIMEOUT)
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made.metadata.uid}
        try:
            with answers(f"create the Service and the Secret of {name} in {namespace}"):
                for create, body in (
                    (core.create_namespaced_service, service),
                    (core.create_namespaced_secret, secret),
                ):
                    owned = {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}}
                    create(namespace, owned, _request_timeout=_TIMEOUT)
        except SubmitError:
            # Its pods would wait for ever.
            with contextlib.suppress(SubmitError):
                self._delete(client, name, namespace)
            raise
        folder = self._records.make_folder(request.name)
        details = {"job": name, "namespace": namespace, "context": context, "grace": request.grace}
        return self._records.add(request, folder, name, uid=made.metadata.uid, **details)

    def status(self, record: Record) -> Status:
        """From the Job and its pods; that of a job that is over is kept, because the cluster may delete it."""
        if record.final is not None:
            return record.final
        client, _, namespace = connect(record)
        job = self._job(client, record)
        if job is None:
            gone = "the Job is not there any more: deleted by somebody else, or by the cluster after its end"
            return Status(CANCELLED) if record.details.get("cancelled") else Status(LOST, gone)
        found = status_of(job, self._pods(client, record, namespace))
        if found.is_over:
            self._records.remember(record, found)
        return found

    def progress(self, record: Record) -> Progress | None:
        """From the chief's output, in which its event log is."""
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
            return last_progress(text.data.decode(errors="replace").splitlines())

    def logs(self, record: Record, to: BinaryIO, follow: bool) -> None:
        """What the chief prints; with `follow`, also what its successors print after a restart."""
        client, _, namespace = connect(record)
        shown, cut_off = None, 0.0
        while True:
            chief = chief_of(self._pods(client, record, namespace))
            started = chief is not None and chief.status.phase != "Pending"
            again = started and chief.metadata.uid == shown
            # At first a pod that has ended still counts as running; after a while, somebody between us has hung up.
            silent = int(time.monotonic() - cut_off) if again else None
            if started and (not again or (chief.status.phase == "Running" and silent >= _PATIENCE)):
                with answers(f"read the output of {chief.metadata.name}"):
                    _copy(client, chief.metadata.name, namespace, to, follow, silent)
                shown, cut_off = chief.metadata.uid, time.monotonic()
            if not follow or self.status(record).is_over:
                return
            time.sleep(_WAIT)

    def cancel(self, record: Record) -> str:
        """Deletes the Job, and with it its pods, which get SIGTERM."""
        client, _, namespace = connect(record)
        if self._job(client, record) is None:
            return f"{record.id}: {self.status(record)}"
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
        # Another one may have got the name since.
        return job if job.metadata.uid == record.details["uid"] else None

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


def make(records: Records) -> KubernetesEngine:
    """The engine."""
    return KubernetesEngine(records)


def _name(request: Request) -> str:
    name = request.name if request.is_named else as_label(request.name, secrets.token_hex(2))
    return checked_name(name, request.tasks)


def _copy(client: Any, pod: str, namespace: str, to: BinaryIO, follow: bool, last: int | None) -> None:
    """Writes the output of a pod, or of its last seconds, as it comes, without the lines that are for `status`."""
    # A follower waits while the pod is silent; the client wants a number for that, too.
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
                # A progress bar, which has no end of a line for long.
                to.write(rest)
                rest = b""
            to.flush()
        to.write(rest)
        to.flush()
    finally:
        answer.release_conn()
