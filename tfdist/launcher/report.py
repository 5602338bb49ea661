"""`tfdist env`: what a process started here would find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import find
from tfdist.cluster.errors import ClusterError
from tfdist.cluster.membership import Membership
from tfdist.cluster.preflight import check
from tfdist.launcher.plan import versions

_RELEVANT = (
    *("TF_", "TFDIST_", "CUDA_", "NCCL_", "KERAS_", "OMP_"),
    # From which clusters are discovered.
    *("SLURM_", "OMPI_COMM_", "PMI_", "MPI_LOCAL", "MV2_COMM_", "HOROVOD_", "JSM_", "LSB_JOBID", "PBS_JOBID"),
    *("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "SM_HOSTS", "SM_CURRENT", "JOB_COMPLETION"),
    *("PET_", "KUBEFLOW_TRAINER_", "FLUX_", "PALS_", "MVP_COMM_", "AZ_BATCH_M", "AWS_BATCH_JOB_", "SKYPILOT_N", "LWS_"),
    *("VC_", "CLUSTER_SPEC", "_CONDOR_N", "_CONDOR_P", "ROCR_", "HIP_"),
)
_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASSWORD", re.IGNORECASE)
_DEVICE_DEADLINE = 60.0
_MARK = "tfdist-devices:"
_LIST_DEVICES = f"""
import json, tensorflow as tf
found = [
    {{"name": device.name, "description": tf.config.experimental.get_device_details(device).get("device_name", "")}}
    for device in tf.config.list_physical_devices()
]
print({_MARK!r} + json.dumps(found))
"""


def gather(with_devices: bool = True, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Everything that is reported, in a form that is also the JSON output.

    Args:
        with_devices: whether to list the devices, which starts TensorFlow in a process of its own.
        env: the environment to look at; the own one by default.

    Example:
        >>> gather(with_devices=False, env={})["cluster"]
        'single process'
    """
    env = os.environ if env is None else env
    problems: list[str] = []
    config: ClusterConfig | Membership | None = None
    try:
        config = find(env)
        # A `Membership` has no addresses yet: the processes exchange them when a strategy or `tfdist check` begins.
        problems += check(config, env) if isinstance(config, ClusterConfig) else []
    except ClusterError as error:
        problems += str(error).splitlines()
    facts: dict[str, Any] = {
        "cluster": str(config) if config else "invalid",
        "environment": config.source if config else None,
        "rank": config.rank if config else None,
        "tf_config": config.to_tf_config() if isinstance(config, ClusterConfig) else None,
        "problems": problems,
        "versions": versions(),
    }
    if with_devices:
        facts["devices"] = devices(env)
    facts["variables"] = relevant_variables(env)
    return facts


def relevant_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that have to do with TensorFlow and clusters; values that may be secret are hidden.

    Example:
        >>> relevant_variables({"TF_X": "1", "KERAS_TOKEN": "abc", "HOME": "/"})
        {'KERAS_TOKEN': '(hidden)', 'TF_X': '1'}
    """
    return {
        name: "(hidden)" if _SECRET.search(name) else env[name] for name in sorted(env) if name.startswith(_RELEVANT)
    }


def devices(env: Mapping[str, str]) -> list[dict[str, str]] | str:
    """TensorFlow's devices, or a sentence that says why they could not be listed."""
    try:
        answer = subprocess.run(
            [sys.executable, "-c", _LIST_DEVICES],
            env={"TF_CPP_MIN_LOG_LEVEL": "3", **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_DEVICE_DEADLINE,
        )
    except subprocess.TimeoutExpired:
        return f"unknown: TensorFlow did not list its devices within {_DEVICE_DEADLINE:g} s"
    for line in answer.stdout.splitlines():
        if line.startswith(_MARK):
            return json.loads(line.removeprefix(_MARK))
    reason = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
    return f"unknown: TensorFlow could not list its devices ({reason})"


def as_text(facts: Mapping[str, Any]) -> str:
    """The facts for people."""
    rank = "none" if facts["rank"] is None else facts["rank"]
    # Without a cluster, the problems below say what is wrong with it.
    known = [f"environment:  {facts['environment']}"] if facts["environment"] else []
    lines = [f"cluster:      {facts['cluster']}", *known, f"rank:         {rank}"]
    lines += _section("problems", facts["problems"] or ["none"])
    lines += _section("versions", _columns(facts["versions"]))
    if "devices" in facts:
        found = facts["devices"]
        listed = (
            [found] if isinstance(found, str) else [f"{one['name']}  {one['description']}".rstrip() for one in found]
        )
        lines += _section("devices", listed)
    lines += _section("variables", _columns(facts["variables"]) or ["none"])
    return "\n".join(lines)


def _section(title: str, entries: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {entry}" for entry in entries)]


def _columns(values: Mapping[str, str]) -> list[str]:
    width = max(map(len, values), default=0)
    return [f"{name:<{width}}  {value}" for name, value in values.items()]
