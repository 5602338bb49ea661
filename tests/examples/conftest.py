"""Starts an example as a user does who has copied nothing but its file."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.conftest import SOURCE, launches, no_gpus, warm_launch  # noqa: F401 - fixtures
from tests.processes import forked

EXAMPLES = SOURCE / "examples"
DEADLINE = 600.0


@pytest.fixture
def example(warm_launch: Callable, tmp_path: Path) -> Callable[..., str]:  # noqa: F811
    """`example(name, *options, run=["-n", "2"])` returns what the first process has printed; without `run`, alone."""

    def start(name: str, *options: str, run: list[str] | None = None, fails: bool = False) -> str:
        shutil.copy(EXAMPLES / name, tmp_path / name)
        if run is None:
            log = tmp_path / f"alone-{len(list(tmp_path.glob('alone-*')))}"
            process = forked([name, *options], log, tmp_path, os.environ)
            try:
                code, printed = process.wait(DEADLINE), log.read_text()
            finally:
                process.kill()
        else:
            started = warm_launch("", command=["run", *run, name, *options])
            result = started.finish(DEADLINE)
            code, printed = result.code, re.sub(r"^\[worker 0\] ", "", result.out, flags=re.MULTILINE) + result.err
            started.assert_nothing_is_left(within=60.0)
        assert (code != 0) is fails, f"exit code {code}:\n{printed[-5000:]}"
        return printed

    return start


def values(printed: str, name: str) -> list[float]:
    """What Keras has printed of a metric, epoch by epoch."""
    return [float(text) for text in re.findall(rf"- {name}: ([\d.e-]+)", printed)]
