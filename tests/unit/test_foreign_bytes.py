"""Whatever bytes come from outside: they are read, or refused in words; nothing else happens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfdist.cluster import ClusterConfig, ClusterError, discovery, meeting, rendezvous, sockets
from tfdist.cluster.environments import slurm
from tfdist.cluster.foreign_text import cleaned, listed
from tfdist.cluster.rendezvous import Registration, endpoints
from tfdist.json_schema import NOTHING, check, is_count, read_json
from tfdist.launcher.check import _MEMBER, Member, _ways_schema, members_table, read_answer, ways_table

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
FEW = settings(SETTINGS, max_examples=40)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.sampled_from(["0", "1", "2", "-1", "x", "", " 1 ", "9" * 30, "1e3", "٣", "0x1", "NaN"])
HOST_LISTS = st.text(alphabet="ab[]0123456789-,() x\x00é", max_size=30)
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)


def _fields(names: list[str]) -> st.SearchStrategy[dict]:
    """Objects with some of these keys, of any kind."""
    return st.dictionaries(st.sampled_from(names) | st.text(max_size=5), JSON, max_size=len(names))


# --- Descriptions -----------------------------------------------------------------------------------------------------

ADDRESSES = st.sampled_from(["a:1", "[::1]:2", "b:0", "c", "http://d:1", "e:99999", "a:1", "f g:1", "\x1b[2J:1"]) | JSON
JOBS = st.dictionaries(
    st.sampled_from(["worker", "chief", "ps", "evaluator", "wroker", "master"]) | st.text(max_size=5),
    st.lists(ADDRESSES, max_size=3) | st.dictionaries(NUMBERS | st.text(max_size=3), ADDRESSES, max_size=3) | JSON,
    max_size=4,
)
TASKS = st.fixed_dictionaries(
    {}, optional={"type": st.sampled_from(["worker", "chief", "ps", "evaluator", "x"]) | JSON, "index": JSON}
)
TF_CONFIGS = st.fixed_dictionaries(
    {}, optional={"cluster": JOBS | JSON, "sparseCluster": JOBS | JSON, "task": TASKS | JSON, "environment": JSON}
)


@SETTINGS
@given(TF_CONFIGS.map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=60))
def test_any_tf_config(text: str) -> None:
    with contextlib.suppress(ClusterError):
        config = ClusterConfig.from_tf_config(text)
        assert ClusterConfig.from_tf_config(config.to_json()).to_json() == config.to_json()


def test_brackets_that_are_too_deep() -> None:
    with pytest.raises(ClusterError, match="maximum recursion depth exceeded"):
        ClusterConfig.from_tf_config("[" * 100_000)


VARIABLES = [
    *("TFDIST_RANK", "TFDIST_SIZE", "TFDIST_LOCAL_RANK", "TFDIST_LOCAL_SIZE", "TFDIST_PS", "TFDIST_MEETING"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE", "PMI_FD", "MV2_COMM_WORLD_RANK"),
    *("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"),
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "LSB_JOBID", "LSB_MCPU_HOSTS", "PBS_JOBID", "JOB_ID"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_NTASKS"),
    *("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_NUM_NODES"),
    *("KUBERNETES_SERVICE_HOST", "HOSTNAME", "JOB_COMPLETION_INDEX", "SM_HOSTS", "SM_CURRENT_HOST", "VC_TASK_INDEX"),
    *("SM_RESOURCE_CONFIG", "AZUREML_RUN_ID", "CLUSTER_SPEC", "PADDLE_TRAINER_ID", "TF_CONFIG", "VC_WORKER_HOSTS"),
]
VALUES = NUMBERS | HOST_LISTS | TEXT | TF_CONFIGS.map(json.dumps) | JSON.map(json.dumps)


@settings(SETTINGS, max_examples=100)
@given(st.dictionaries(st.sampled_from(VARIABLES), VALUES, max_size=12))
def test_any_environment(env: dict[str, str]) -> None:
    with contextlib.suppress(ClusterError):
        discovery.find(env)


@SETTINGS
@given(HOST_LISTS | st.text(max_size=30))
def test_any_list_of_nodes(text: str) -> None:
    with contextlib.suppress(ClusterError):
        assert slurm.first_host(text)
    assert all(isinstance(count, int) for count in slurm.tasks_per_node(text[:12]))


@SETTINGS
@given(st.text(max_size=30) | st.integers() | st.none())
def test_any_address(text: object) -> None:
    with contextlib.suppress(ValueError):
        host, port = sockets.split_address(text)  # type: ignore[arg-type]
        assert host and 1 <= port <= 65535
    with contextlib.suppress(ClusterError):
        low, high = endpoints.port_range({"TFDIST_PORTS": str(text)})
        assert 0 < low < high <= 65536


# --- Messages ---------------------------------------------------------------------------------------------------------


INTRODUCTION = meeting.introduction(ClusterConfig({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}), {"same.keras": "3"})


@SETTINGS
@given(st.builds(lambda changed: {**INTRODUCTION, **changed}, _fields(list(INTRODUCTION))) | JSON)
def test_any_introduction(said: object) -> None:
    with contextlib.suppress(ValueError):
        problems = meeting.disagreements(INTRODUCTION, meeting.read_introduction(said))
        assert all(problem.isprintable() and len(problem) < 20_000 for problem in problems)


REGISTRATION = dataclasses.asdict(Registration(1, 2, 2001, None, "127.0.0.1", "node-1", 7, reached="127.0.0.1"))


@SETTINGS
@given(st.builds(lambda changed: {**REGISTRATION, **changed}, _fields(list(REGISTRATION))))
def test_any_registration(content: dict) -> None:
    with contextlib.suppress(ValueError):
        said = Registration.read(content)
        assert str(said).isprintable() and 0 < said.port < 65536


@SETTINGS
@given(st.text(max_size=100) | JSON, st.integers(0, 50))
def test_any_text_is_printable_when_it_is_cleaned(text: object, most: int) -> None:
    assert cleaned(text).isprintable()
    assert len(cleaned(text, most)) <= 10 * most + 3
    assert "\x1b" not in listed([cleaned(text)], more=most)


# --- Conversations ----------------------------------------------------------------------------------------------------


@SETTINGS
@given(_fields(["hosts", "port", "secret"]).map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=40))
def test_anything_from_a_launchers_channel(text: str) -> None:
    with contextlib.suppress(ClusterError):
        _, (port,), secret = rendezvous._told(text)
        assert 0 < port < 65536 and isinstance(secret, bytes)


# --- The check --------------------------------------------------------------------------------------------------------

HOSTS_TOLD = _fields(["host", "cores", "gpus", "versions", "public"]) | st.fixed_dictionaries(
    {
        **dict.fromkeys(("task", "address"), st.just("a:1")),
        "host": st.text(max_size=400),
        "cores": st.integers(-1, 9),
        "gpus": st.integers(0, 9),
        "versions": st.dictionaries(st.sampled_from(["keras", "python"]), st.text(max_size=9) | SCALARS, max_size=2),
        "public": st.lists(st.text(), max_size=2),
    }
)
WAYS_TOLD = st.dictionaries(st.sampled_from(["0", "1", "2", "x"]), JSON | st.floats() | st.text(), max_size=2)


@SETTINGS
@given(HOSTS_TOLD | JSON, WAYS_TOLD | JSON)
def test_whatever_a_process_tells_the_check(host: object, ways: object) -> None:
    try:
        members = [Member(**read_answer(host, _MEMBER, "introduction", "worker 1"))] * 2
        told = read_answer({"ways": ways, "sums": True}, _ways_schema(2), "ways", "worker 1")["ways"]
        tables = [members_table(members), ways_table(members, [{int(other): way for other, way in told.items()}, {}])]
    except ClusterError as error:
        assert "of worker 1: it" in str(error) and str(error).isprintable()
    else:
        assert all(line.isprintable() for table in tables for line in table.splitlines())


SCHEMA = {"pid": int, "rate": float, "name?": (str, NOTHING), "parts": [{"size": lambda value: value in (1, 2)}]}
GOOD: dict[str, Any] = {"pid": 7, "rate": 1, "name": None, "parts": [{"size": 1}]}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"name": "a"}, None),
        ({"rate": 0.5, "parts": []}, None),
        ({"pid": 7.0}, "its pid is 7.0"),
        ({"pid": True}, "its pid is True"),
        ({"pid": 10**15}, "its pid is 1000000000000000"),
        ({"rate": float("nan")}, "its rate is nan"),
        ({"rate": "1"}, "its rate is '1'"),
        ({"name": 5}, "its name is 5"),
        ({"parts": {}}, "its parts is {}"),
        ({"parts": [{"size": 1}, {"size": 3}]}, "its parts.size is 3"),
        ({"parts": [{}]}, "its parts.size is missing"),
        ({"new\x1b": 1}, r"it has new\x1b, which this version cannot read"),
    ],
)
def test_what_fits_and_what_does_not(changes: dict[str, Any], problem: str | None) -> None:
    text = json.dumps({**GOOD, **changes})
    if problem is None:
        assert read_json(text, SCHEMA) == {**GOOD, **changes}
        return
    with pytest.raises(ValueError) as caught:
        read_json(text.encode(), SCHEMA)
    assert str(caught.value) == problem


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *[(empty, "it is empty") for empty in ("", "\0\0", " \n")],
        *[(broken, "it is no JSON") for broken in ("{", "\xff", "[" * 100_000, "1" * 5000)],
        ("[]", "it is []"),
    ],
)
def test_what_is_no_json(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r"^it is") as caught:
        read_json(text.encode("latin-1"), {"pid": int})
    assert str(caught.value).startswith(problem)


def test_counts_are_those_that_tensorflow_takes() -> None:
    check((1 << 63) - 1, is_count)
    with pytest.raises(ValueError, match="it is 9223372036854775808"):
        check(1 << 63, is_count)


def test_all_other_names_may_have_one_schema() -> None:
    check({"a": 1, "b": 2}, {...: int})
    with pytest.raises(ValueError, match="its b is 'x'"):
        check({"a": 1, "b": "x"}, {...: int})


@SETTINGS
@given(JSON)
def test_whatever_it_is_it_fits_or_is_named(value: Any) -> None:
    for schema in (SCHEMA, [int], (str, [SCHEMA]), {...: float}):
        try:
            check(value, schema)
        except ValueError as error:
            assert str(error).isprintable() and len(str(error)) < 300
