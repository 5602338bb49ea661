"""What a process on another host gets, and what can be seen of it on the way, with a program in the place of ssh."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tfdist.cluster.variables import travels
from tfdist.launcher.horovod.options import DiscoveryError, hosts_of
from tfdist.launcher.horovod.remote import over_there
from tfdist.launcher.process import start_unpinned
from tfdist.launcher.run_plan import ProcessPlan

# Writes down its command line, and runs the command without this host's variables, as sshd does.
SSH = """\
#!/bin/sh
tr '\\0' '\\n' < /proc/$$/cmdline > "{folder}/seen"
while [ "$1" != "far away" ]; do shift; done
shift
exec env -i HOME=/ PATH=/bin:/usr/bin /bin/sh -c "$*"
"""
PROGRAM = """\
import json, os, sys
content = {"env": dict(os.environ), "words": sys.argv[2:], "folder": os.getcwd(), "stdin": sys.stdin.read()}
open(sys.argv[1], "w").write(json.dumps(content))
"""
SECRET = "s3c'ret $(id)\nsecond line"


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts a program over there, and returns what it has found, and all command lines on the way."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    work = tmp_path / "it's here"
    work.mkdir()
    monkeypatch.chdir(work)
    (work / "program.py").write_text(PROGRAM)

    def start(env: dict[str, str], chosen: set[str]) -> tuple[dict, str]:
        words = (sys.executable, str(work / "program.py"), str(tmp_path / "found"), "a b", "$HOME")
        command, variables = over_there(words, "far away", env, chosen)
        own = {**env, "PATH": f"{ssh.parent}:{os.environ['PATH']}"}
        process = start_unpinned(ProcessPlan("worker", 0, command, own, stdin=variables), subprocess.DEVNULL)
        assert process.wait(30) == 0
        return json.loads((tmp_path / "found").read_text()), " ".join(command) + (tmp_path / "seen").read_text()

    return start


def test_variables_arrive_and_are_in_no_command_line(started) -> None:
    env = {"TFDIST_TOKEN": SECRET, "KEY": "chosen " + SECRET, "AWS_SECRET_ACCESS_KEY": "of the cloud"}
    found, seen = started({**env, "HOROVOD_HOSTNAME": "far away", "BASH_FUNC_x%%": "() { :; }"}, chosen={"KEY"})
    assert found["env"]["TFDIST_TOKEN"] == SECRET and found["env"]["KEY"] == "chosen " + SECRET
    assert found["env"]["HOROVOD_HOSTNAME"] == "far away"
    assert not {"AWS_SECRET_ACCESS_KEY", "BASH_FUNC_x%%"} & set(found["env"])
    assert (found["words"], found["folder"], found["stdin"]) == (["a b", "$HOME"], os.getcwd(), "")
    assert "far away" in seen and "s3c" not in seen and "TFDIST_TOKEN" not in seen


def test_a_large_environment(started) -> None:
    """More than a pipe or an argument holds."""
    found, _ = started({"TF_LONG": "x" * 100_000, "TF_OTHER": "y" * 100_000}, chosen=set())
    assert len(found["env"]["TF_LONG"]) == len(found["env"]["TF_OTHER"]) == 100_000


def test_kubeflow_gives_no_input_to_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_MCA_plm_rsh_agent", "/etc/mpi/kubexec.sh")
    command, variables = over_there(("true",), "pod", {"TF_A": "1\n2", "OTHER": "3"}, set())
    assert variables == b"" and command[2].startswith("/etc/mpi/kubexec.sh pod ")
    (script,) = shlex.split(command[2])[2:]
    assert "TF_A" in script and "OTHER" not in script


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("PATH", True),
        ("PYTHONPATH", True),
        ("OMP_NUM_THREADS", True),
        # Where tensorflow_datasets and tensorflow_hub keep what they have fetched.
        ("TFDS_DATA_DIR", True),
        ("TFHUB_CACHE_DIR", True),
        ("TFOTHER", False),
        ("CUDA_VISIBLE_DEVICES", False),
        ("_HOROVOD_SECRET_KEY", False),
        ("GITHUB_TOKEN", False),
        ("SSH_AUTH_SOCK", False),
        ("a b", False),
    ],
)
def test_what_goes(name: str, expected: bool) -> None:
    assert travels(name, ()) is expected


def test_a_host_is_no_option_of_ssh() -> None:
    with pytest.raises(DiscoveryError, match="Expected: host:slots"):
        hosts_of("-oProxyCommand=id:1\n", "hosts.sh")
