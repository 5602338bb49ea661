"""What is decided about elastic jobs before Horovod is asked: hosts, network, options, and folders that are left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE, wait_until
from tfdist.launcher.horovod.options import (
    ElasticOptions,
    check_hosts,
    check_network,
    check_options,
    discover_hosts,
    hosts_of,
)
from tfdist.launcher.run_plan import PlanError
from tfdist.strategies.horovod import memory_folders

OPTIONS = {"most": 4, "interface": "lo", "show_all": False, "grace": 10.0, "max_restarts": 3, "command": ("true",)}


def program(folder: Path, text: str) -> str:
    path = folder / "hosts.sh"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


class TestDiscovery:
    def test_hosts_that_are_there(self, tmp_path):
        path = program(tmp_path, "echo b:2\necho\necho a:1\necho gone:0\n")  # without the line of an interpreter
        assert discover_hosts(path) == {"b": 2, "a": 1}

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("hello world", "printed the line 'hello world'. Expected: host:slots"),
            ("node-1", "printed the line 'node-1'. Expected: host:slots"),
            ("node-1:many", "printed the line 'node-1:many'. Expected: host:slots"),
            ("node-1:1\nnode-1:2", "named node-1 twice. Expected: one line for each host"),
        ],
    )
    def test_what_is_no_list_of_hosts(self, text, problem):
        with pytest.raises(PlanError) as error:
            hosts_of(text, "hosts.sh")
        assert f"--host-discovery hosts.sh: it has {problem}" in str(error.value)

    def test_a_program_that_fails(self, tmp_path):
        path = program(tmp_path, "echo no such cluster >&2; exit 3")
        with pytest.raises(PlanError, match=r"failed with exit code 3, and printed: no such cluster\. Expected: exit"):
            discover_hosts(path)

    def test_no_program(self, tmp_path):
        with pytest.raises(PlanError, match="expected a program that can be run"):
            discover_hosts(str(tmp_path / "hosts.sh"))
        with pytest.raises(PlanError, match="expected a program that can be run"):
            discover_hosts(str(tmp_path))


class TestNetwork:
    @pytest.mark.parametrize("hosts", [{}, {"localhost": 4}])
    def test_horovod_would_wait_for_a_second_host(self, hosts):
        with pytest.raises(PlanError, match="Add --interface lo if all processes stay on this machine"):
            check_network(hosts, None, "hosts.sh")
        check_network(hosts, "lo", "hosts.sh")
        check_network({"a": 1, "b": 1}, None, "hosts.sh")

    def test_an_interface_that_is_not_there(self):
        with pytest.raises(PlanError, match=r"--interface eth99: this machine has no such .* one of .*\blo\b"):
            check_network({"a": 1}, "eth99", "hosts.sh")


class TestNotices:
    @pytest.mark.parametrize(
        ("text", "notice"),
        [
            ("echo localhost:4", "all processes are on one host, localhost: Horovod does not use a host again"),
            ("echo localhost:1", "names hosts for 1 processes: waiting until there are 2"),
            ("echo localhost:1; echo 127.0.0.1:1", None),
        ],
    )
    def test_what_the_user_should_know(self, tmp_path, text, notice):
        notices = check_hosts(ElasticOptions(program=program(tmp_path, text), fewest=2, **OPTIONS))
        assert len(notices) == (notice is not None)
        assert all(notice in found for found in notices)


class TestOptions:
    @pytest.mark.parametrize(
        "name", ["chief", "evaluator", "cpus_per_worker", "gpus_per_worker", "host", "hang_timeout"]
    )
    def test_options_that_would_do_nothing(self, name):
        with pytest.raises(PlanError, match=f"--{name.replace('_', '-')} and --host-discovery: expected only one"):
            check_options(["workers", name], has_range=True)

    def test_options_that_work(self):
        check_options(["workers", "max_restarts", "log_dir", "output", "grace", "env"], has_range=True)

    def test_the_number_of_processes_is_needed(self):
        with pytest.raises(PlanError, match=r"--host-discovery: expected -n MIN:MAX, too"):
            check_options([], has_range=False)


LIVES = """
import sys, time
from tfdist.strategies.horovod.memory_folders import memory_folder
class Owner: pass
owner = Owner()
print(memory_folder(owner), flush=True)
if "ends" not in sys.argv:
    time.sleep(60)
"""


def test_folders_whose_process_is_gone_are_removed_and_no_others(tmp_path, monkeypatch):
    command = [sys.executable, "-c", LIVES]
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    living, killed = (subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2))
    try:
        folders = [Path(process.stdout.readline().strip()) for process in (living, killed)]
        assert all(folder.is_dir() for folder in folders)
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait(10)
        assert folders[1].is_dir()
        # That of another process with the same number, and that of a container.
        prefix = f"tfdist-elastic-{memory_folders._namespace()}-{living.pid}"
        reused = folders[0].with_name(f"{prefix}-1-x")
        elsewhere = folders[0].with_name(f"tfdist-elastic-1-{killed.pid}-1-x")
        for folder in (reused, elsewhere):
            folder.mkdir()
        memory_folders.remove_abandoned()
        assert [folder.is_dir() for folder in (*folders, reused, elsewhere)] == [True, False, False, True]
        elsewhere.rmdir()
        ended = subprocess.run([*command, "ends"], env=env, capture_output=True, text=True, timeout=30)
        assert not Path(ended.stdout.strip()).exists()
    finally:
        for process in (living, killed):
            process.kill()
            process.wait()
            process.stdout.close()
    wait_until(lambda: memory_folders._start_of(living.pid) is None, 5, "the end of the process")
    memory_folders.remove_abandoned()
    assert not folders[0].exists()
