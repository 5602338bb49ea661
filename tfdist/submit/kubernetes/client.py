"""The official client, configured as kubectl is, and what the cluster answers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tfdist.submit.errors import SubmitError
from tfdist.submit.kubernetes.packages import load
from tfdist.submit.record import Record

_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_REMEDIES = {
    401: "log in again, as for kubectl",
    403: "ask for the right to create, read and delete jobs, services, secrets and pods' logs in this namespace",
    409: "choose another --name, or delete that one",
    422: "correct what it names",
}


def connect(record: Record | None) -> tuple[Any, str | None, str]:
    """The client, and context and namespace: those of a job, or else the current ones.

    Raises:
        SubmitError: the extra is not installed, or no cluster is configured.
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
            # In a pod that may create jobs.
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
    """Makes a SubmitError of what goes wrong between us and the cluster.

    Args:
        what: is asked for.
    """
    client = load("kubernetes.client", "kubernetes")
    http = load("urllib3", "kubernetes")
    try:
        yield
    except client.ApiException as error:
        said = error.body if isinstance(error.body, str) else error.reason
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = json.loads(error.body)["message"]
        raise SubmitError(
            f"Received: {error.status} ({said}), when asked to {what}. Expected: that the cluster does it; "
            f"{_REMEDIES.get(error.status, 'see what it says')}"
        ) from None
    except http.exceptions.HTTPError as error:
        raise SubmitError(
            f"Received: no answer from Kubernetes, when asked to {what} ({error}). Expected: that the cluster of the "
            "current context is reachable; try `kubectl get jobs`"
        ) from None
