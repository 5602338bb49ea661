"""Reading, writing and describing clusters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tfdist.cluster import ClusterConfig, ClusterError, discover
from tfdist.cluster.discovery import find

TWO = {"worker": ["a:1", "b:2"]}
ROUND_TRIPS = [
    {"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}},
    {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}},
    {"cluster": {"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "task": {"type": "chief", "index": 0}},
    {"cluster": {"worker": {"1": "b:1"}}, "task": {"type": "worker", "index": 1}},
    {"cluster": {"worker": {"0": "a:1", "3": "b:1"}, "ps": ["p:1"]}, "task": {"type": "ps", "index": 0}},
    {"cluster": {"worker": ["[::1]:1", "[fe80::1]:65535"]}, "task": {"type": "worker", "index": 0}},
    {"cluster": {"worker": ["a:1"]}, "task": {"type": "evaluator", "index": 0}},
    {"cluster": {"worker": ["a:1"], "evaluator": ["e:1"]}, "task": {"type": "evaluator", "index": 0}},
    {"cluster": {"worker": [f"h{i}:2222" for i in range(12)]}, "task": {"type": "worker", "index": 11}},
    {},
]


@pytest.mark.parametrize("content", ROUND_TRIPS)
def test_round_trip(content: dict) -> None:
    config = ClusterConfig.from_tf_config(json.dumps(content))
    assert config.to_tf_config() == content
    assert json.loads(config.to_json()) == content
    assert ClusterConfig.from_tf_config(content) == config
    assert ClusterConfig.from_tf_config(config.to_json()).to_json() == config.to_json()


@pytest.mark.parametrize(
    ("jobs", "task", "rank", "num_workers", "chief", "address"),
    [
        (TWO, ("worker", 0), 0, 2, "a:1", "a:1"),
        (TWO, ("worker", 1), 1, 2, "a:1", "b:2"),
        ({"worker": ["w:1"], "chief": ["c:1"]}, ("worker", 0), 1, 2, "c:1", "w:1"),
        ({"worker": ["w:1"], "chief": ["c:1"]}, ("chief", 0), 0, 2, "c:1", "c:1"),
        ({"worker": {"5": "w:1", "3": "v:1"}}, ("worker", 5), 1, 2, "v:1", "w:1"),
        ({"worker": ["w:1"], "ps": ["p:1"]}, ("ps", 0), None, 1, "w:1", "p:1"),
        ({"worker": ["w:1"]}, ("evaluator", 0), None, 1, "w:1", None),
        ({"ps": ["p:1"]}, ("ps", 0), None, 0, None, "p:1"),
    ],
)
def test_ranks(
    jobs: dict, task: tuple[str, int], rank: int | None, num_workers: int, chief: str | None, address: str | None
) -> None:
    config = ClusterConfig(jobs, *task)
    assert (config.rank, config.num_workers, config.chief_address, config.address) == (
        rank,
        num_workers,
        chief,
        address,
    )
    assert config.is_chief == (rank == 0)
    assert not config.is_single_process


def test_text_indexes_are_numbers() -> None:
    config = ClusterConfig({"worker": {"1": "b:2", 0: "a:1"}}, "worker", "1")  # type: ignore[arg-type, dict-item]
    assert config.jobs == {"worker": {0: "a:1", 1: "b:2"}}
    assert config.task_index == 1
    assert config.tasks() == (("worker", 0, "a:1"), ("worker", 1, "b:2"))
    assert config.to_tf_config()["cluster"] == TWO


@pytest.mark.parametrize("content", ["{}", '{"task": {"cloud": "c"}, "job": {}}', '{"environment": "cloud"}'])
def test_without_a_cluster_it_is_a_single_process(content: str) -> None:
    config = ClusterConfig.from_tf_config(content)
    assert config.is_single_process
    assert config.is_chief
    assert (config.rank, config.num_workers, config.address, config.chief_address) == (0, 1, None, None)
    assert config == ClusterConfig.single_process()
    assert str(config) == "single process"


def test_text_form() -> None:
    config = ClusterConfig(TWO, "worker", 1, "TF_CONFIG")
    assert str(config) == "worker 1, rank 1 of 2; cluster: worker 0 (a:1), worker 1 (b:2); from TF_CONFIG"
    assert "evaluator 0, no rank" in str(config.with_task("evaluator", 0))


def test_fingerprint_is_that_of_the_jobs() -> None:
    one = ClusterConfig({"chief": ["c:1"], "worker": ["a:1", "b:2"]}, "chief", 0)
    other = ClusterConfig({"worker": {"1": "b:2", "0": "a:1"}, "chief": ["c:1"]}, "worker", 1, "elsewhere")
    assert one.fingerprint() == other.fingerprint() == one.with_task("evaluator", 0).fingerprint()
    assert one.fingerprint() != ClusterConfig({"chief": ["c:1"], "worker": ["b:2", "a:1"]}).fingerprint()
    assert len(one.fingerprint()) == 12


def test_equality_is_that_of_the_cluster_and_the_task() -> None:
    config = ClusterConfig(TWO)
    assert config == ClusterConfig({"worker": {"0": "a:1", "1": "b:2"}}, source="elsewhere")
    assert config != config.with_task("worker", 1)
    assert len({config, ClusterConfig(TWO)}) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "Received: TF_CONFIG, which is set, but blank"),
        (" \n", "unset TF_CONFIG to train in this process alone"),
        ('{"task": {"type": "worker", "index": 0}}', '"cluster" is missing, beside the keys "task"'),
        ('{"cluster": null, "task": {"type": "worker", "index": 0}}', '"cluster" is null'),
        ('{"clusters": {"worker": ["a:1"]}}', '"cluster" is missing, beside the keys "clusters"'),
    ],
)
def test_what_was_meant_to_have_a_cluster(content: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said):
        discover({"TF_CONFIG": content})


def test_a_blank_one_hides_no_cluster() -> None:
    other = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert find({"TF_CONFIG": "", **other}).size == find(other).size == 2


def test_discover_order() -> None:
    text = ClusterConfig(TWO, "worker", 1).to_json()
    assert discover({}).source == "single process"
    assert discover({"TF_CONFIG": text}).source == "TF_CONFIG"
    assert discover({"TF_CONFIG": text}).rank == 1
    both = discover({"TF_CONFIG": text, "TFDIST_CLUSTER": text})
    assert (both.source, both.rank) == ("TFDIST_CLUSTER", 1)
    assert discover({"TFDIST_CLUSTER": text}).rank == 1


def test_discover_reads_the_process_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFDIST_CLUSTER", raising=False)
    monkeypatch.setenv("TF_CONFIG", ClusterConfig(TWO, "worker", 1).to_json())
    assert discover().address == "b:2"


def test_discover_refuses_two_different_clusters() -> None:
    config = ClusterConfig(TWO)
    env = {"TF_CONFIG": config.with_task("worker", 1).to_json(), "TFDIST_CLUSTER": config.to_json()}
    with pytest.raises(ClusterError) as caught:
        discover(env)
    message = str(caught.value)
    assert message.startswith("TFDIST_CLUSTER and TF_CONFIG disagree: TFDIST_CLUSTER says worker 0")
    assert "TF_CONFIG says worker 1" in message
    assert "unset TFDIST_CLUSTER" in message
    assert len(caught.value.problems) == 1


def test_nothing_here_imports_tensorflow() -> None:
    code = (
        "import sys, tfdist.cluster, tfdist.cluster.ports, tfdist.cluster.barrier as b\n"
        "c = tfdist.cluster.discover({}); tfdist.cluster.preflight.check(c); b.meet(c)\n"
        "print([name for name in ('tensorflow', 'keras', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
