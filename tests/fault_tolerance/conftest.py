"""Processes for training jobs, and trials with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fault_tolerance.forked_jobs import ForkedJobs
from tests.fault_tolerance.trials import Trials


@pytest.fixture(scope="session")
def jobs() -> Iterator[ForkedJobs]:
    """Starts training jobs."""
    with ForkedJobs() as started:
        yield started


@pytest.fixture(scope="module")
def trials(
    request: pytest.FixtureRequest, jobs: ForkedJobs, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trials]:
    """The trials of a module; those of all its tests that are to run begin with the first one."""
    made = Trials(jobs, tmp_path_factory.mktemp("trials"))
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    made.begin(item.callspec.params["case"] for item in items if "case" in item.callspec.params)
    yield made
    made.close()
