"""The objects that Kubernetes is asked to create for a job. Pure.

References:
    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
    https://kubernetes.io/docs/tasks/job/pod-failure-policy/
"""

from __future__ import annotations

import re
from typing import Any

from tfdist.jobs.request import Request, SubmitError
from tfdist.launcher.arguments import Target
from tfdist.supervision.events import STANDARD_OUTPUT
from tfdist.supervision.events import VARIABLE as EVENT_LOG
from tfdist.supervision.exit_codes import PREEMPTED, REFUSED

# User and group of docker/Dockerfile. Files that are written to volumes belong to this group.
USER = 1000
INSTANCE = "app.kubernetes.io/instance"
# A random word that the job's record has, too, before the Job exists.
SUBMISSION = "tfdist-submission"
_TOKEN_KEY = "token"
# A DNS label that begins with a letter: it is also the name of the Service, and the pods' host names begin with it.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST = 63


def manifests(request: Request, name: str, token: str) -> list[dict[str, Any]]:
    """The Secret, the Service and the Job.

    Args:
        request: what was asked for.
        name: of all three; see `checked_name`.
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


def checked_name(wanted: str, tasks: int) -> str:
    """The name of a job, if Kubernetes allows it.

    Args:
        wanted: the name.
        tasks: number of pods: a pod's host name is that of the job with the pod's index.

    Raises:
        SubmitError: Kubernetes does not allow it.

    Example:
        >>> checked_name("train-2", 4)
        'train-2'
    """
    longest = _LONGEST - len(f"-{tasks - 1}")
    if _NAME.fullmatch(wanted) and len(wanted) <= longest:
        return wanted
    raise SubmitError(
        f"Received: --name {wanted!r} for a job on Kubernetes. Expected: a DNS label of at most {longest} lower-case "
        "letters, digits and hyphens, a letter first, no hyphen at the end; the pods' host names are made of it"
    )


def as_label(name: str, suffix: str) -> str:
    """A name that Kubernetes allows, made from the name of a program.

    Example:
        >>> as_label("Train_digits", "x7k2p")
        'train-digits-x7k2p'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"job-{plain}".rstrip("-")
    return f"{plain}-{suffix}"


def _job(request: Request, name: str, labels: dict[str, str]) -> dict[str, Any]:
    spec: dict[str, Any] = {
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
    }
    if request.time_limit:
        spec["activeDeadlineSeconds"] = request.time_limit
    return spec


def _pod(request: Request, name: str) -> dict[str, Any]:
    pod: dict[str, Any] = {
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
    }
    if request.volumes:
        pod["volumes"] = [
            {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}}
            for number, claim in enumerate(request.volumes)
        ]
    if request.pack:
        near = {"labelSelector": {"matchLabels": {INSTANCE: name}}, "topologyKey": "kubernetes.io/hostname"}
        # Preferred, not required: a job that does not fit on one host has to run, too.
        pod["affinity"] = {
            "podAffinity": {
                "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": near}]
            }
        }
    return pod


def _container(request: Request, name: str) -> dict[str, Any]:
    own = {
        "TFDIST_SIZE": str(request.tasks),
        # Files of a pod cannot be read from outside, so events go to its output. `tfdist logs` leaves them out.
        EVENT_LOG: STANDARD_OUTPUT,
        **request.of_all,
    }
    chosen = {**request.runtime_defaults, **request.env}
    env: list[dict[str, Any]] = [{"name": key, "value": literal(value)} for key, value in {**chosen, **own}.items()]
    env.append({"name": "TFDIST_TOKEN", "valueFrom": {"secretKeyRef": {"name": name, "key": _TOKEN_KEY}}})
    container: dict[str, Any] = {
        "name": "tfdist",
        "image": request.image,
        "command": [literal(word) for word in command_in_image(request.target)],
        "env": env,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    amounts = {"cpu": request.cpus_per_worker, "nvidia.com/gpu": request.gpus_per_worker}
    limits = {resource: str(amount) for resource, amount in amounts.items() if amount}
    if limits:
        container["resources"] = {"limits": limits, "requests": dict(limits)}
    if request.volumes:
        container["volumeMounts"] = [
            {"name": f"volume-{number}", "mountPath": path} for number, path in enumerate(request.volumes.values())
        ]
    return container


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
