"""Slurm's own commands."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess

from tfdist.submit.errors import SubmitError
from tfdist.submit.request import Request

_SECONDS = 60
_GPUS = re.compile(r"\bgpu(?::[^:,()]+)?:(\d+)")


def run(*words: str) -> str:
    """What a command prints.

    Raises:
        SubmitError: it is not there, fails, or does not answer.
    """
    answer = attempt(*words)
    if answer.returncode != 0:
        said = (answer.stderr or answer.stdout).strip() or f"exit code {answer.returncode}"
        raise SubmitError(
            f"Received: from {' '.join(words[:2])}: {said}. Expected: that Slurm accepts it; see above why"
        )
    return answer.stdout


def attempt(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that may fail.

    Raises:
        SubmitError: it is not there, or does not answer.
    """
    if shutil.which(words[0]) is None:
        raise SubmitError(
            f"Received: no command {words[0]} on the PATH. Expected: Slurm's commands; submit where they are, usually "
            "on a login node, or use another --backend"
        )
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise SubmitError(
            f"Received: no answer from {words[0]} within {_SECONDS} s. Expected: that Slurm's controller is reachable; "
            "`scontrol ping` shows whether it is"
        ) from None


def nodes_for(request: Request) -> int:
    """On how many nodes all processes fit, if they are the largest ones; 1 where there is no Slurm to ask.

    Example:
        >>> nodes_for(Request("slurm", Target("script", ("train.py",)), workers=2))
        1
    """
    if shutil.which("sinfo") is None:
        return 1
    partition = os.environ.get("SBATCH_PARTITION")
    listing = run(
        "sinfo", "--noheader", "--Node", "--format=%c|%G", *([f"--partition={partition}"] if partition else [])
    )
    return fewest_nodes(request, listing)


def fewest_nodes(request: Request, listing: str) -> int:
    """The same from what sinfo prints about each node: cores, and generic resources.

    Example:
        >>> request = Request("slurm", Target("script", ("train.py",)), workers=8, gpus_per_worker=1)
        >>> fewest_nodes(request, "16|gpu:a100:4(S:0-1)\\n16|(null)\\n")
        2
    """
    nodes = [line.partition("|") for line in listing.splitlines() if line.strip()]
    cores = max((int(re.sub(r"\D", "", first) or 0) for first, _, _ in nodes), default=0)
    gpus = max((sum(map(int, _GPUS.findall(last))) for _, _, last in nodes), default=0)
    needed = 1
    for each, most in ((request.cpus_per_worker or 1, cores), (request.gpus_per_worker or 0, gpus)):
        if each and most >= each:
            needed = max(needed, math.ceil(request.tasks / (most // each)))
    return needed
