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
def trials(jobs: ForkedJobs, tmp_path_factory: pytest.TempPathFactory) -> Trials:
    """The trials of a module."""
    return Trials(jobs, tmp_path_factory.mktemp("trials"))
