"""The objects that Kubernetes is asked to create for a job. Pure.

References:
    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    https://kubernetes.io/docs/tasks/job/pod-failure-policy/
"""

from __future__ import annotations

import re
from typing import Any

from tfdist.jobs.request import Request
from tfdist.launcher.arguments import Target
from tfdist.supervision.events import STANDARD_OUTPUT
from tfdist.supervision.events import VARIABLE as EVENT_LOG
from tfdist.supervision.exit_codes import PREEMPTED, REFUSED

# User and group of docker/Dockerfile. Files that are written to volumes belong to this group.
USER = 1000
INSTANCE = "app.kubernetes.io/instance"
_TOKEN_KEY = "token"
# The host name of a pod is that of the Job with the pod's index, and a DNS label.
_LONGEST = 63


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
