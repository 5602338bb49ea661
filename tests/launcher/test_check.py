"""`tfdist check` as real processes: what is well, and each kind of fault, planted."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from types import SimpleNamespace

import pytest

from tfdist.cluster import ports
from tfdist.launcher.check import check

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(250)]

_DEADLINE = 200
# A process that is told that it has another version, or that does not listen where it says.
_OTHER_VERSION = """
from tfdist.launcher import check, plan
check.versions = lambda: {**plan.versions(), "tensorflow": "2.19.9"}
"""
_NO_SUM = """
import subprocess, sys, types
from tfdist.launcher import check
hang = [sys.executable, "-c", "print('started', flush=True); import time; time.sleep(1000)"]
start = lambda command, **how: subprocess.run(hang, **how)
check.subprocess = types.SimpleNamespace(**{**vars(subprocess), "run": start})
"""
_IMPATIENT = """
from tfdist.launcher import check
check._SUM_SECONDS = {seconds}
"""
# What takes long is done before --timeout counts: only who is not started at all comes too late.
_TOGETHER = """
import os, time
import tfdist.launcher.check, tfdist.launcher.command
open({folder!r} + "/{rank}", "w").close()
while len(os.listdir({folder!r})) < {count}: time.sleep(0.01)
"""
_BLOCKED = """
import contextlib
from tfdist.launcher import check
check._listening = lambda port: contextlib.nullcontext()
"""


def run(
    ranks: list[int],
    size: int,
    *options: str,
    plant: str = "",
    everywhere: str = "",
    env: dict | None = None,
    level: str | None = "3",
) -> list[tuple[int, str]]:
    """Exit code and output of the ranks that are started; the last of them has the fault."""
    with ports.reserve(1) as reservation:
        meeting = reservation.ports[0]
    results: dict[int, tuple[int, str]] = {}

    settings = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    if level is not None:
        settings["TF_CPP_MIN_LOG_LEVEL"] = level

    def one(rank: int) -> None:
        code = everywhere + (plant if rank == ranks[-1] else "")
        code += _TOGETHER.format(folder=folder, rank=rank, count=len(ranks))
        code += "\nfrom tfdist.launcher.command import main; main()"
        variables = {"TFDIST_RANK": str(rank), "TFDIST_SIZE": str(size), "TFDIST_MEETING": f"localhost:{meeting}"}
        process = subprocess.run(
            [sys.executable, "-c", code, "check", *options],
            env={**settings, **(variables if env is None else env)},
            capture_output=True,
            text=True,
            timeout=_DEADLINE,
        )
        results[rank] = process.returncode, process.stdout + process.stderr

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    with tempfile.TemporaryDirectory() as folder:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for rank, (code, output) in sorted(results.items()):
        print(f"--- rank {rank}, exit code {code}\n{output}")
    return [results[rank] for rank in ranks]


def last_line(output: str) -> str:
    """What rank 0 has said at last, without what TensorFlow adds."""
    return [line for line in output.splitlines() if line.startswith(("ready", "not ready", "tfdist: not ready"))][-1]


@pytest.mark.nightly
def test_all_is_well():
    # The timeout is for the others, not for the start of TensorFlow; and what that prints is not shown.
    (code, output), (other_code, other) = run([0, 1], 2, "--timeout", "20", level=None)
    assert (code, other_code) == (0, 0)
    assert last_line(output) == "ready"
    lines = output.splitlines()
    rows = [line.split() for line in lines if line.startswith(("0     worker", "1     worker"))]
    assert [row[:3] for row in rows] == [["0", "worker", "0"], ["1", "worker", "1"]]
    assert sum(line.rstrip().endswith(" us") or " us  " in line for line in lines) == 2
    assert "TensorFlow's all-reduce: the right sum everywhere" in output
    assert "tfdist's own transport: the right sum everywhere" in output
    assert "ready" not in other
    assert len(lines) == 11 and lines[-1] == "tfdist: rank 0 of 2, from TFDIST_RANK", output
    assert other.splitlines() == ["tfdist: rank 1 of 2, from TFDIST_RANK"]


@pytest.mark.nightly
def test_a_sum_that_does_not_end():
    (code, output), (other_code, _) = run([0, 1], 2, everywhere=_NO_SUM + _IMPATIENT.format(seconds=15))
    assert (code, other_code) == (1, 1)
    assert last_line(output).startswith("not ready: TensorFlow's all-reduce failed in worker ")
    assert "it has not ended within 15 s" in last_line(output)


def test_tensorflow_that_is_still_starting():
    (code, output), (other_code, _) = run([0, 1], 2, everywhere=_IMPATIENT.format(seconds=0.1))
    assert (code, other_code) == (1, 1)
    assert "TensorFlow was still starting after 0.1 s (a slow file system? few cores?). Start the" in last_line(output)
    assert "--no-tensorflow" in last_line(output)


def test_a_missing_rank():
    found = run([0, 2], 3, "--timeout", "10")
    for code, output in found:
        assert code == 1
        # The seconds are those that were left when the waiting began.
        says = r"not ready: not all tasks came within start_timeout=[\d.]+ s; missing: rank 1; start"
        assert re.search(says, last_line(output)), output


def test_another_version():
    (code, output), (other_code, _) = run([0, 1], 2, plant=_OTHER_VERSION)
    assert (code, other_code) == (1, 1)
    assert last_line(output).startswith("not ready: tensorflow is 2.")
    assert "2.19.9 on worker 1. Expected: the same everywhere" in last_line(output)
    assert "all-reduce" not in output


def test_a_blocked_process():
    (code, output), (other_code, _) = run([0, 1], 2, plant=_BLOCKED)
    assert (code, other_code) == (1, 1)
    assert last_line(output).startswith("not ready: worker 0 on ")
    assert "does not reach worker 1 on" in last_line(output) and "Connection refused" in last_line(output)
    assert "blocked" in output


def test_what_another_host_tells_is_cleaned():
    plant = 'from tfdist.launcher import check\ncheck.host_name = lambda env: "mine\\33]0;x\\7" + "y" * 1000\n'
    (code, output), _ = run([0, 1], 2, "--no-tensorflow", plant=plant)
    assert code == 0 and last_line(output) == "ready"
    assert "mine\\x1b]0;x\\x07yyy" in output and "\33" not in output and "y" * 200 not in output


_OF_A_NUMBER = """
from tfdist.launcher import check, plan
check.versions = lambda: {**plan.versions(), "tensorflow": 7}
"""
_OF_A_LIST = """
from tfdist.launcher import check
check._ways = lambda *_: {"0": []}
"""


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (
            _OF_A_NUMBER,
            "Received: the introduction of worker 1: its member.versions.tensorflow is 7. Expected: what this version",
        ),
        (
            _OF_A_LIST,
            "Received: the ways of worker 1: its ways.0 is []. Expected: what this version of tfdist",
        ),
    ],
)
def test_an_answer_of_another_kind_is_refused(plant: str, said: str):
    (code, output), _ = run([0, 1], 2, "--no-tensorflow", "--timeout", "10", plant=plant)
    assert code == 1 and last_line(output).startswith(f"tfdist: not ready: {said}") and "Traceback" not in output


def test_a_port_that_is_taken():
    with ports.reserve(2) as reservation:
        addresses = [f"127.0.0.1:{port}" for port in reservation.ports]
    with socket.create_server(("", int(addresses[0].rpartition(":")[2]))):
        config = f'{{"cluster": {{"worker": {addresses}}}, "task": {{"type": "worker", "index": 0}}}}'.replace("'", '"')
        ((code, output),) = run([0], 2, env={"TF_CONFIG": config})
    assert code == 1
    assert f"not ready: worker 0: cannot bind port {addresses[0].rpartition(':')[2]}" in last_line(output)


def test_a_public_address_is_warned_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    address = SimpleNamespace(address="8.8.4.4"), SimpleNamespace(address="10.0.0.1")
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"eth0": address, "lo": [SimpleNamespace(address="127.0.0.1")]})
    monkeypatch.setenv("TFDIST_RANK", "0")
    monkeypatch.setenv("TFDIST_SIZE", "1")
    assert check(5.0, with_tensorflow=False) == 0
    warning, ready = capsys.readouterr().out.splitlines()
    assert " has the public address 8.8.4.4: TensorFlow listens on all addresses and asks nobody" in warning
    assert warning.startswith("warning: ") and ready.startswith("ready: ")


def in_own_network(*words: str) -> list[str]:
    """The command that `tfdist run --help`, `tfdist check` and the quickstart name."""
    line = f"ip link set lo up; exec {shlex.join(words)}"
    return ["unshare", "--net", "--map-root-user", "sh", "-c", line]


def can_have_own_network() -> bool:
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    return subprocess.run(in_own_network("true"), capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.skipif(not can_have_own_network(), reason="this system does not let us make a network")
def test_two_workers_in_a_network_of_their_own(launch):
    """Nobody outside reaches them, and they reach each other."""
    run = (sys.executable, "-m", "tfdist", "run", "-n", "2", "--output", "all", "--")
    check_of_it = (sys.executable, "-m", "tfdist", "check", "--no-tensorflow")
    result = launch("", command=in_own_network(*run, *check_of_it)).finish(120)
    assert result.code == 0, result.err
    assert "ready" in result.out and "blocked" not in result.out and "warning" not in result.out


def test_alone():
    ((code, output),) = run([0], 1)
    assert (code, last_line(output)) == (
        0,
        "ready: one process (TFDIST_RANK). For several, start this as the training: `srun tfdist check`",
    )
