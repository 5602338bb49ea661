"""Successful runs: what the processes get and where their output goes."""

from __future__ import annotations

import json
import os
import re
import socket
import sys

import pytest

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


@pytest.mark.exhaustive
def test_all_output_can_be_shown(launch) -> None:
    result = launch("print('out of', name)", "-n", "3", "--output", "all").finish()
    assert sorted(result.out.splitlines()) == [f"[worker {index}] out of worker-{index}" for index in range(3)]


@pytest.mark.exhaustive
def test_progress_bar_in_a_pipe_becomes_its_final_state(launch) -> None:
    started = launch("for step in range(50): print('\\b' * 20 + f'\\r{step}/49 ━━', end='', flush=True)\nprint()")
    assert started.finish().out == "[worker 0] 49/49 ━━\n"
    assert "\r3/49" in started.log("worker-0")


@pytest.mark.exhaustive
def test_eight_processes_on_few_cores(launch, tmp_path) -> None:
    assert launch(WRITE_FACTS, "-n", "8").finish(40).code == 0
    found = facts(tmp_path)
    assert len(found) == 8
    addresses = found["worker-0"]["cluster"]["worker"]
    assert len(set(addresses)) == 8
    assert all(content["cluster"] == found["worker-0"]["cluster"] for content in found.values())
    if len(os.sched_getaffinity(0)) < 8:
        assert all(content["cpus"] == sorted(os.sched_getaffinity(0)) for content in found.values())


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
        while not all(Path(f"up-{other}").exists() for other in ("ps-0", "evaluator-0")): time.sleep(0.02)
        if job == "ps": time.sleep(100)
    """
    started = launch(script, "-n", "1", "--ps", "1", "--evaluator")
    result = started.finish()
    assert result.code == 0
    assert result.out == "[chief 0] up\n"
    assert started.log("ps-0") == started.log("evaluator-0") == started.log("worker-0") == "up\n"


@pytest.mark.exhaustive
def test_two_launchers_at_once_use_different_ports(launch, tmp_path) -> None:
    script = WRITE_FACTS + "\n    time.sleep(0.5)"
    started = [launch(script, "-n", "4") for _ in range(2)]
    assert [one.finish().code for one in started] == [0, 0]
    clusters = {json.dumps(json.loads(path.read_text())["cluster"]) for path in tmp_path.glob("facts-*.json")}
    addresses = [address for cluster in clusters for address in json.loads(cluster)["worker"]]
    assert len(clusters) == 2
    assert len(set(addresses)) == 8


@pytest.mark.exhaustive
def test_port_of_a_stranger_is_left_alone(launch, tmp_path) -> None:
    # The search for free ports starts at a random port: here always at the first one, where a stranger listens.
    with socket.socket() as stranger:
        for taken in range(20000, 21000):
            try:
                stranger.bind(("", taken))
                break
            except OSError:
                continue
        stranger.listen()
        driver = (
            "import random, tfdist.launcher.command as command\n"
            f"random.SystemRandom.randrange = lambda self, *bounds: {taken - 20000}\n"
            "command.main(['run', '-n', '2', 'script.py'])"
        )
        assert launch(WRITE_FACTS, command=[sys.executable, "-c", driver]).finish().code == 0
    addresses = facts(tmp_path)["worker-1"]["cluster"]["worker"]
    assert f"127.0.0.1:{taken}" not in addresses
    assert all(taken < int(address.rpartition(":")[2]) < taken + 1000 for address in addresses)


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


@pytest.mark.exhaustive
def test_log_dir_can_be_chosen(launch, tmp_path) -> None:
    result = launch("print(os.environ['TFDIST_LOG_DIR'])", "--log-dir", "my/logs").finish()
    assert result.out == f"[worker 0] {tmp_path}/my/logs\n"
    assert (tmp_path / "my/logs/worker-1.log").read_text() == f"{tmp_path}/my/logs\n"
    assert "output of worker 1 goes to my/logs/" in result.err


def test_reader_that_goes_away_does_not_end_the_training(launch, tmp_path) -> None:
    started = launch("for number in range(200): print('x' * 1000); time.sleep(0.002)\nPath('end').touch()", "-n", "1")
    assert started.popen.stdout is not None
    started.popen.stdout.close()
    assert started.popen.wait(20) == 0
    assert (tmp_path / "end").exists()
    assert len(started.log("worker-0").splitlines()) == 200


@pytest.mark.exhaustive
def test_exit_code_survives_a_closed_terminal(launch) -> None:
    started = launch("time.sleep(0.5); sys.exit(3)", "-n", "1")
    for stream in (started.popen.stdout, started.popen.stderr):
        assert stream is not None
        stream.close()
    assert started.popen.wait(20) == 3
