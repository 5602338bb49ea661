"""Successful runs: what the processes get and where their output goes."""

from __future__ import annotations

import json
import os
import re
import sys

import pytest

from tests.launcher.conftest import DEADLINE

WRITE_FACTS = """
    Path(f"facts-{name}-{os.environ['TFDIST_RUN_ID']}.json").write_text(json.dumps({
        "arguments": sys.argv[1:], "env": dict(os.environ), "cpus": sorted(os.sched_getaffinity(0)),
        "leads_group": os.getpgid(0) == os.getpid(), "descriptors": sorted(os.listdir("/proc/self/fd")),
        "task": config["task"], "cluster": config["cluster"],
    }))
"""


def facts(folder) -> dict[str, dict]:
    found = {}
    for path in folder.glob("facts-*.json"):
        content = json.loads(path.read_text())
        found[f"{content['task']['type']}-{content['task']['index']}"] = content
    return found


def test_arguments_and_environment_are_passed_through(launch, tmp_path) -> None:
    arguments = ["--flag", "-n", "7", "a b", "--", "-m", "x=y"]
    started = launch(
        WRITE_FACTS, "--env", "MINE=a=b", arguments=arguments, env={"THEIRS": "kept", "OMP_NUM_THREADS": "5"}
    )
    result = started.finish()
    assert (result.code, result.out) == (0, "")
    found = facts(tmp_path)
    assert sorted(found) == ["worker-0", "worker-1"]
    for content in found.values():
        assert content["arguments"] == arguments
        assert content["env"]["MINE"] == "a=b"
        assert content["env"]["THEIRS"] == "kept"
        assert content["env"]["OMP_NUM_THREADS"] == "5"
        assert content["env"]["TFDIST_CLUSTER"] == content["env"]["TF_CONFIG"]
        assert content["leads_group"] is True
        # Standard streams and the folder being listed: neither the guardian's pipe nor the reserved ports.
        assert content["descriptors"] == ["0", "1", "2", "3"]
    assert found["worker-0"]["env"]["TFDIST_LOG_DIR"] == found["worker-1"]["env"]["TFDIST_LOG_DIR"]
    assert os.path.isdir(found["worker-0"]["env"]["TFDIST_LOG_DIR"])


def test_output_of_the_first_is_shown_and_of_all_is_logged(launch) -> None:
    started = launch("print('out of', name); print('err of', name, file=sys.stderr)")
    result = started.finish()
    assert result.code == 0
    assert sorted(result.out.splitlines()) == ["[worker 0] err of worker-0", "[worker 0] out of worker-0"]
    assert re.fullmatch(
        r"tfdist: 2 workers on this machine; output of worker 1 goes to tfdist-logs/[-\d]+/\n", result.err
    )
    assert sorted(started.log("worker-0").splitlines()) == ["err of worker-0", "out of worker-0"]
    assert sorted(started.log("worker-1").splitlines()) == ["err of worker-1", "out of worker-1"]


@pytest.mark.parametrize(("visible", "expected"), [("0,1,2", ["0", "1", "2"]), ("1", ["1"]), ("", ["", ""])])
def test_without_a_number_there_is_a_worker_for_each_gpu(launch, visible: str, expected: list[str]) -> None:
    script = "print(os.environ['CUDA_VISIBLE_DEVICES'], 'is all that', name, 'sees')"
    result = launch(script, "--output", "all", env={"CUDA_VISIBLE_DEVICES": visible}).finish()
    assert sorted(result.out.splitlines()) == [
        f"[worker {index}] {gpu} is all that worker-{index} sees" for index, gpu in enumerate(expected)
    ]


@pytest.mark.nightly
def test_all_output_can_be_shown(launch) -> None:
    result = launch("print('out of', name)", "-n", "3", "--output", "all").finish()
    assert sorted(result.out.splitlines()) == [f"[worker {index}] out of worker-{index}" for index in range(3)]


@pytest.mark.nightly
def test_progress_bar_in_a_pipe_becomes_its_final_state(launch) -> None:
    started = launch("for step in range(50): print('\\b' * 20 + f'\\r{step}/49 ━━', end='', flush=True)\nprint()")
    assert started.finish().out == "[worker 0] 49/49 ━━\n"
    assert "\r3/49" in started.log("worker-0")


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_are_pinned_to_cores_of_their_own(launch, tmp_path) -> None:
    assert launch(WRITE_FACTS, "--cpus-per-worker", "1").finish().code == 0
    found = facts(tmp_path)
    assert [len(content["cpus"]) for content in found.values()] == [1, 1]
    assert found["worker-0"]["cpus"] != found["worker-1"]["cpus"]
    assert found["worker-0"]["env"]["TF_NUM_INTRAOP_THREADS"] == "1"


def test_parameter_servers_end_with_the_training(launch) -> None:
    script = """
        print("up", flush=True)
        Path(f"up-{name}").touch()
        # The training shall not end before the others have begun.
        while not (Path("up-ps-0").exists() and Path("up-worker-0").exists()): time.sleep(0.02)
        if job == "ps": time.sleep(1000)
    """
    started = launch(script, "-n", "1", "--ps", "1")
    result = started.finish()
    assert result.code == 0
    assert result.out == "[chief 0] up\n"
    assert started.log("ps-0") == started.log("worker-0") == "up\n"


def test_child_can_listen_on_its_port(launch) -> None:
    script = """
        import socket
        host, port = config["cluster"][job][index].split(":")
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, int(port)))
            server.listen()
            socket.create_connection((host, int(port)), 5).close()
            print("served")
    """
    started = launch(script)
    assert (started.finish().code, started.log("worker-1")) == (0, "served\n")


def test_module_and_command(launch, tmp_path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys; print(sys.argv[1:])")
    tfdist_run = [sys.executable, "-m", "tfdist", "run", "-n", "1"]
    result = launch("", command=[*tfdist_run, "-m", "package.train", "-n", "5"]).finish()
    assert (result.code, result.out) == (0, "[worker 0] ['-n', '5']\n")
    result = launch("", command=[*tfdist_run, "--", "sh", "-c", "echo $TFDIST_RUN_ID; exit 4"]).finish()
    assert result.code == 4
    assert re.fullmatch(r"\[worker 0\] \d{8}-\d{6}-\d+\n", result.out)


def test_the_ports_are_those_that_are_allowed(launch) -> None:
    script = "print([int(address.rpartition(':')[2]) for address in config['cluster']['worker']])"
    result = launch(script, env={"TFDIST_PORTS": "21000-21099"}).finish()
    assert result.code == 0, result.err
    ports = json.loads(result.out.removeprefix("[worker 0] "))
    assert len(ports) == 2 and all(21000 <= port <= 21099 for port in ports)
    wrong = launch("", env={"TFDIST_PORTS": "many"}).finish()
    assert wrong.code != 0 and "Received: TFDIST_PORTS='many'. Expected: two ports" in wrong.err


def test_reader_that_goes_away_does_not_end_the_training(launch, tmp_path) -> None:
    started = launch("for number in range(200): print('x' * 1000); time.sleep(0.002)\nPath('end').touch()", "-n", "1")
    assert started.popen.stdout is not None
    started.popen.stdout.close()
    assert started.popen.wait(DEADLINE) == 0
    assert (tmp_path / "end").exists()
    assert len(started.log("worker-0").splitlines()) == 200


@pytest.mark.nightly
def test_exit_code_survives_a_closed_terminal(launch) -> None:
    started = launch("time.sleep(0.5); sys.exit(3)", "-n", "1")
    for stream in (started.popen.stdout, started.popen.stderr):
        assert stream is not None
        stream.close()
    assert started.popen.wait(DEADLINE) == 3


@pytest.mark.parametrize("words", ["run -n 2", pytest.param("tune", marks=pytest.mark.nightly)])
def test_a_folder_that_was_deleted(launch, tmp_path, words: str) -> None:
    (tmp_path / "gone").mkdir()
    command = f"cd gone && rmdir ../gone && {sys.executable} -m tfdist {words} ../script.py ../script.py"
    result = launch("", command=["sh", "-c", command.replace("../script.py ../", str(tmp_path) + "/")]).finish()
    assert (result.code, result.err.count("\n")) == (1, 1)
    assert result.err.startswith("tfdist: Received: a current folder that does not exist any more. Expected: one that")


@pytest.mark.netns
def test_a_machine_without_ipv4(launch) -> None:
    without = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo; exec"
    words = f"{without} {sys.executable} -m tfdist run -n 2 script.py"
    script = "print(config['cluster']['worker'][0].rpartition(':')[0])"
    result = launch(script, command=["unshare", "--net", "--map-root-user", "sh", "-c", words]).finish()
    assert (result.code, result.out) == (0, "[worker 0] [::1]\n")
