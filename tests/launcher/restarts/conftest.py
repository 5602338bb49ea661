"""Launches without a process that imports TensorFlow for the next restart: these programs do not use it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.launcher.conftest import Launch


@pytest.fixture
def launch(launch: Callable[..., Launch]) -> Callable[..., Launch]:
    """`launch` as elsewhere, with cold restarts."""

    def start(script: str, *options: str, **more) -> Launch:
        return launch(script, "--no-warm", *options, **more)

    return start
