"""Real clusters for the tests: each is started once, and only for the tests that need it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.jobs.conftest import run_tfdist as run_tfdist  # for what submits
from tests.system.hosts import Hosts
from tests.system.jobs import FIT, Jobs
from tests.system.slurm import Slurm

_running: list[Slurm] = []


@pytest.fixture(scope="session", autouse=True)
def heed_sigterm() -> Iterator[None]:
    """Who stops these tests by it, as .ci/run does, is to find nothing left: they end as with Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def jobs(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Starts commands; those that still run are ended with the test, which shows their output if it has failed."""
    failed_before = request.session.testsfailed
    started = Jobs(tmp_path)
    yield started
    try:
        started.close()
    finally:
        if request.session.testsfailed > failed_before:
            print(started.outputs(), *(slurm.logs() for slurm in _running), sep="\n")


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts whose network nobody disturbs."""
    with Hosts(tmp_path_factory.mktemp("hosts")) as running:
        yield running


@pytest.fixture
def own_hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Hosts whose network a test may damage."""
    (tmp_path / "hosts").mkdir()
    with Hosts(tmp_path / "hosts") as running:
        yield running


@pytest.fixture
def own_hosts_in_two_networks(tmp_path: Path) -> Iterator[Hosts]:
    """The same with eth0 and eth1."""
    with Hosts(tmp_path, networks=2) as running:
        yield running


@pytest.fixture(scope="session")
def slurm_here() -> Iterator[Slurm]:
    """A Slurm whose three nodes are all this machine."""
    yield from _started(None)


@pytest.fixture(scope="session")
def slurm_on_hosts(hosts: Hosts) -> Iterator[Slurm]:
    """A Slurm whose nodes are the three hosts."""
    yield from _started(hosts)


@pytest.fixture(params=["here", pytest.param("on_hosts", marks=pytest.mark.netns)])
def slurm(request: pytest.FixtureRequest) -> Slurm:
    """Each of the two."""
    return request.getfixturevalue(f"slurm_{request.param}")


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """What `fit_program` computes in one process."""
    jobs = Jobs(tmp_path_factory.mktemp("one"))
    try:
        job = jobs.start(*FIT)
        assert job.end(120) == 0, job.output
        (found,) = job.training()
        return found
    finally:
        jobs.close()


def _started(hosts: Hosts | None) -> Iterator[Slurm]:
    if os.geteuid() != 0:
        pytest.skip("Slurm's daemons are started by root only")
    with Slurm(hosts) as slurm:
        _running.append(slurm)
        yield slurm
        _running.remove(slurm)
