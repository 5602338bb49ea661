"""What the tests of Horovod share: they are skipped, with the reason, where it is not installed."""

from __future__ import annotations

import pytest

from tests.launcher.conftest import launch, launches, warm_launch
from tfdist.launcher.plan import versions
from tfdist.strategies.horovod.installation import problem

__all__ = ["launch", "launches", "warm_launch"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = problem(versions()["tensorflow"])
    if reason is not None:
        for item in items:
            if "tests/horovod/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"{reason} `make horovod` does both."))
