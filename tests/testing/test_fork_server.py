"""`preload`: which processes of `run_local` are forked, and that the others are started afresh."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import ForkedPopen, forked, living, preloaded
from tfdist.launcher.local import fork_server
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def servers() -> None:
    preloaded()


@pytest.fixture
def new_ones_afterwards() -> Iterator[None]:
    """For a test that ends servers."""
    yield
    fork_server.close()
    preloaded()


def is_forked() -> bool:
    return b"fork_program.py" in Path("/proc/self/cmdline").read_bytes()


def test_tensorflow_is_there_at_once_and_unused():
    def function() -> tuple[bool, bool, int]:
        import sys

        before = "tensorflow" in sys.modules
        import tensorflow as tf

        # Fails in a process that has used its devices.
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
        return before, is_forked(), len(tf.config.list_logical_devices("CPU"))

    assert run_local(function) == [(True, True, 3)] * 2


@pytest.mark.parametrize("name", ["TF_ENABLE_ONEDNN_OPTS", "PYTHONHASHSEED"])
def test_what_is_read_at_the_start_makes_a_fresh_process(name):
    found = run_local(lambda: (is_forked(), os.environ[name]), env={name: "1"})
    assert found == [(False, "1")] * 2
    assert run_local(is_forked) == [True, True]


@pytest.mark.nightly
def test_what_importing_tensorflow_sets_makes_no_difference():
    """A test process imports it sooner or later; this one may have done so before the server of the test."""
    names = ("TF2_BEHAVIOR", "KMP_INIT_AT_FORK")
    bare = {name: value for name, value in fork_server.own_environment().items() if name not in names}
    server = fork_server.ForkServer(bare)
    try:
        assert starts(server, bare)
        assert server.set_by_import["TF2_BEHAVIOR"] == "1"
        assert starts(server, {**bare, **server.set_by_import})
        assert not starts(server, {**bare, "TF2_BEHAVIOR": "0"})
    finally:
        server.close()


def starts(server: fork_server.ForkServer, env: dict[str, str]) -> bool:
    """Whether a server forks a process with this environment, which ends well then."""
    with open(os.devnull, "wb") as output:
        process = server.start(["-m", "this"], env, output.fileno())
    return process is not None and process.wait() == 0


def test_each_draws_other_random_numbers_and_two_ranks_differ_in_the_hashes_of_strings():
    def draw() -> list[float]:
        import random

        import numpy as np
        import tensorflow as tf

        return [hash("a"), random.random(), np.random.rand(), float(tf.random.uniform([]))]

    hashes, *drawn = zip(*run_local(draw, 3), *run_local(draw, 1), strict=True)
    assert [len(set(numbers)) for numbers in drawn] == [4, 4, 4]
    assert hashes[0] != hashes[1] and hashes[0] == hashes[2]  # one server for both


def test_what_is_forked_can_be_found(tmp_path):
    """By it the tests see that nothing is left."""
    (tmp_path / "pause.py").write_text("import signal; signal.pause()")
    before = set(living())  # what an earlier test has left may still be ending
    process = forked(["pause.py"], tmp_path / "log", tmp_path, os.environ)
    assert isinstance(process, ForkedPopen)
    assert set(living()) - before == {process.pid}
    process.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert set(living()) <= before


def test_without_a_server_processes_are_started_afresh(new_ones_afterwards):
    fork_server.close()
    assert run_local(is_forked) == [False, False]


@pytest.mark.nightly
def test_a_server_that_dies_is_done_without(new_ones_afterwards):
    assert run_local(is_forked) == [True, True]
    os.kill(fork_server._servers[1].process.pid, signal.SIGKILL)
    assert run_local(is_forked) == [True, False]
