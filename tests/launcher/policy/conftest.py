"""The launcher's policy, on simulated processes and a simulated clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.policy import simulation


@pytest.fixture
def simulate(tmp_path: Path) -> Callable[..., simulation.Run]:
    """`simulate(program, *launcher_options, signals=[(seconds, number)])` returns what happened."""

    def start(program: simulation.Program, *options: str, **more) -> simulation.Run:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return simulation.simulate(folder, program, *options, **more)

    return start
