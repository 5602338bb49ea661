from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import markdown
from benchmarks.data_parallel.processes import TrialError
from benchmarks.parameter_server import __main__ as program
from benchmarks.parameter_server import clusters, tables, wire
from benchmarks.parameter_server.trials import PARTS, PEERS, Case, Trial, by_case, trials_of

SETTING = clusters.Setting((2, 5), 30.0, {**dict.fromkeys(PEERS, "/python"), "tf_keras": "/other"})


def test_trials_travel_as_plain_values() -> None:
    trial = Trial(Case("embedding", "adagrad", 1000), "tfdist", 2, 8, max_inflight=4)
    assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("quick", [False, True])
def test_every_part_compares_all_peers(part: str, quick: bool) -> None:
    trials = trials_of(part, PEERS, quick)
    assert len(set(trials)) == len(trials)
    assert {trial.peer for trial in trials} == set(PEERS)
    for of_case in by_case(trials):
        assert {trial.cluster for trial in of_case} >= {("plain", 0), ("tfdist", 2)}
        for trial in of_case:
            plain = Trial(trial.case, "plain", steps_per_execution=trial.steps_per_execution)
            assert plain in of_case, "a ratio needs it"


def test_number_of_trials() -> None:
    assert {part: len(trials_of(part, PEERS)) for part in PARTS} == {
        "dense": 23,
        "wide": 23,
        "sleep": 22,
        "inflight": 15,
        "embedding": 45,
    }


def test_a_peer_that_is_missing_has_no_trials() -> None:
    assert {trial.peer for trial in trials_of("dense", ["plain", "tfdist"])} == {"plain", "tfdist"}


def test_adam_changes_every_row_and_is_left_out_for_the_large_table() -> None:
    cases = {trial.case for trial in trials_of("embedding", PEERS)}
    assert {case.rows for case in cases if case.optimizer == "adam"} == {200_000}
    assert {case.rows for case in cases if case.optimizer == "lazy_adam"} == {200_000, 2_000_000}
    stock = [trial for trial in trials_of("embedding", PEERS) if trial.peer == "tf_keras"]
    assert all(trial.case.optimizer != "lazy_adam" for trial in stock)


def sample(ms: float, **others: float) -> dict:
    return {"ms": ms, "chief_cpu_ms": 1.5, "draw_cpu_ms": 0.25, "bytes": None, **others}


def test_table() -> None:
    case = Case("dense")
    plain, own, stock = Trial(case, "plain"), Trial(case, "tfdist", 2), Trial(case, "tf_keras", 2, worker_input=True)
    of_cluster = {"ps_cpu_ms": 0.5, "worker_cpu_ms": 2.0, "bytes": 61_250.0}
    samples = {
        plain: [sample(1.0), sample(2.0), sample(3.0)],
        own: [sample(4.0, **of_cluster)],
        stock: [sample(6.0, **of_cluster)],
    }
    report = tables.report({"dense": ([plain, own, stock, Trial(case, "tfdist", 1)], samples)})
    assert report.splitlines() == [
        "### Dense 64-64-1 on 32 features, batch 32",
        "",
        "| Framework | Workers | ms a step | Speed / plain | Speed / tf_keras | Chief's CPU, ms | Without data "
        "| ps' CPU, ms | Workers' CPU, ms | KB a step |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
        "| Keras 3, one process |  | 2.00 (1.00-3.00) | 1.00 |  | 1.50 | 1.25 |  |  |  |",
        "| tfdist | 2 | 4.00 (4.00-4.00) | 0.50 | 1.50 | 1.50 | 1.25 | 0.50 | 2.00 | 61.2 |",
        "| tf_keras, tf.distribute | 2 | 6.00 (6.00-6.00) | 0.33 |  | 1.50 | 1.25 | 0.50 | 2.00 | 61.2 |",
        "| tfdist | 1 | failed |  |  |  |  |  |  |  |",
    ]


def test_ratios_are_to_trials_with_the_same_workers_and_calls() -> None:
    case = Case("dense")
    samples = {
        Trial(case, "plain", steps_per_execution=8): [sample(1.0)],
        Trial(case, "tfdist", 1, 8, max_inflight=4): [sample(2.0)],
        Trial(case, "tf_keras", 1, 8, worker_input=True): [sample(5.0)],
        Trial(case, "tf_keras", 2, 8, worker_input=True): [sample(50.0)],
        Trial(case, "tf_keras", 1, 1, worker_input=True): [sample(50.0)],
    }
    line = tables.report({"dense": ([Trial(case, "tfdist", 1, 8, max_inflight=4)], samples)}).splitlines()[-1]
    assert line.startswith("| tfdist, steps_per_execution=8, max_inflight=4 | 1 | 2.00 (2.00-2.00) | 0.50 | 2.50 |")


def test_bytes_are_counted_once_at_the_side_that_listens() -> None:
    output = (
        "ESTAB 0 0 127.0.0.1:20001 127.0.0.1:41000 cubic wscale:7,7 bytes_sent:900 bytes_acked:800 bytes_received:70\n"
        "ESTAB 0 0 127.0.0.1:41000 127.0.0.1:20001 cubic bytes_sent:70 bytes_acked:70 bytes_received:800\n"
        "ESTAB 0 0 [::ffff:127.0.0.1]:20002 [::ffff:127.0.0.1]:41002 cubic bytes_received:5\n"
        "ESTAB 0 0 127.0.0.1:9999 127.0.0.1:41001 cubic bytes_acked:1000 bytes_received:1000\n"
        "TIME-WAIT 0 0 127.0.0.1:20001 127.0.0.1:41003\n"
    )
    assert wire.count(output, [20001, 20002]) == 875


def test_processes_and_their_cores() -> None:
    commands = clusters.make_commands("tf_keras", 2, SETTING, [20001, 20002, 20003, 20004], "/socket")
    assert {command.words for command in commands} == {
        ("/other", "-m", "benchmarks.parameter_server.tf_keras_process", "/socket")
    }
    assert [command.cores for command in commands] == [(2,), (5,), (5,), (2,)]
    configs = [json.loads(command.env["TF_CONFIG"]) for command in commands]
    assert [(config["task"]["type"], config["task"]["index"]) for config in configs] == [
        ("chief", 0),
        ("worker", 0),
        ("worker", 1),
        ("ps", 0),
    ]
    assert configs[3]["cluster"] == {
        "chief": ["127.0.0.1:20001"],
        "worker": ["127.0.0.1:20002", "127.0.0.1:20003"],
        "ps": ["127.0.0.1:20004"],
    }


def test_the_single_process_has_no_cluster() -> None:
    (command,) = clusters.make_commands("plain", 0, SETTING, [], "/socket")
    assert command.words == ("/python", "-m", "benchmarks.parameter_server.keras_process", "/socket")
    assert command.cores == (2,)
    assert "TF_CONFIG" not in command.env


def setting_of(python: Path, program: str) -> clusters.Setting:
    """Processes that run `program` with the socket's address as `sys.argv[1]`, whatever their module would be."""
    code = python.with_suffix(".py")
    code.write_text(f"import sys\n{program}")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{code}" "$3"\n')
    python.chmod(0o755)
    core = min(os.sched_getaffinity(0))
    return clusters.Setting((core, core), 20.0, {"plain": str(python)})


ANSWERS = """
from multiprocessing.connection import Client
connection = Client(sys.argv[1], "AF_UNIX")
connection.recv()
connection.send((None, None))
name, arguments = connection.recv()
"""


def test_answers_of_the_chief(tmp_path: Path) -> None:
    answer = ANSWERS + "connection.send((arguments['a'] + 1, None)); connection.recv(); connection.send((None, 'no'))"
    with clusters.started("plain", 0, setting_of(tmp_path / "python", answer)) as cluster:
        assert cluster.ask("add", a=1) == 2
        with pytest.raises(TrialError, match=r"^no$"):
            cluster.ask("fail")
        (pid,) = cluster.processes.pids
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("print('went wrong'); raise SystemExit(3)", r"(?s)(process 0 ended with 3|has ended).*went wrong"),
        ("import time; time.sleep(60)", r"no answer after 1 s; give more time by --deadline"),
    ],
)
def test_a_chief_that_does_not_answer(ending: str, message: str, tmp_path: Path) -> None:
    with clusters.started("plain", 0, setting_of(tmp_path / "python", ANSWERS + ending)) as cluster:
        cluster.deadline = 1.0
        with pytest.raises(TrialError, match=message):
            cluster.ask("measure")


def test_a_chief_that_does_not_start(tmp_path: Path) -> None:
    begin = time.monotonic()
    setting = setting_of(tmp_path / "python", "print('no such thing'); raise SystemExit(1)")
    with (
        pytest.raises(TrialError, match=r"(?s)process 0 ended with 1; expected 0.*no such thing"),
        clusters.started("plain", 0, setting),
    ):
        pass
    assert time.monotonic() - begin < 15


@pytest.mark.parametrize("python", ["/no/such/python", "/bin/false"])
def test_an_interpreter_without_tf_keras(python: str) -> None:
    assert program.why_without_tf_keras(python) == (
        f"tf_keras, tf.distribute is left out: {python} has no tf_keras. Install it by `pip install tf_keras`, or name "
        "another interpreter by --tf-keras-python."
    )
    assert program.why_without_tf_keras("/bin/true") is None


def test_markdown() -> None:
    assert markdown.table(["a", "b"], [["1", "2"]], left=1) == "| a | b |\n| --- | --: |\n| 1 | 2 |"
    assert markdown.spread([3.0, 1.0, 2.5], decimals=1) == "2.5 (1.0-3.0)"
