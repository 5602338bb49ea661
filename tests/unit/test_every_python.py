"""A fresh copy of the repository works with the oldest and the newest Python that are promised.

The oldest trains the demo; the newest only finds out what it would install, as a minute of downloading and unpacking
TensorFlow would tell nothing else. Unlike other tests, these use the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.conftest import Launch

ROOT = Path(__file__).parents[2]
DEADLINE = 550.0

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git does not know which files belong to the repository"),
]


def find_python(version: str) -> str:
    """A Python of that version that runs: in PATH, where version managers leave commands that do not, or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version} that runs, neither in PATH nor below {pyenv}/versions")


def run(folder: Path, *command: str) -> str:
    """Runs a command and returns what it prints, which pytest shows if the test fails."""
    log = folder.with_suffix(".log")
    # A make that runs this test would otherwise hand its options down, and have this one print where it is.
    env = {"PYTHONPATH": "", "MAKEFLAGS": "", "MAKELEVEL": ""}
    with log.open("wb") as out:
        launch = Launch(folder, command, stdout=out, stderr=subprocess.STDOUT, env=env)
    try:
        code = launch.finish(DEADLINE).code
    finally:
        launch.clean_up()
        print(log.read_text())
    assert code == 0, command
    return log.read_text()


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """A copy of the files that git knows, or would take; without the gigabytes of its environment, pytest keeps it."""
    copy = tmp_path / "copy"
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines():
        if (ROOT / name).exists():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    yield copy
    shutil.rmtree(copy / ".venv", ignore_errors=True)


@pytest.mark.parametrize(("version", "trains"), [("3.10", True), ("3.13", False)])
def test_a_fresh_copy_installs_and_trains(copy: Path, version: str, trains: bool) -> None:
    make = ("make", f"PYTHON={find_python(version)}")
    if trains:
        last = run(copy, *make, "demo", "ARGS=--epochs 3").splitlines()[-1]
        match = re.fullmatch(r"\[worker 0\] test accuracy: (0\.\d+); saved as digits\.keras", last)
        assert match and float(match[1]) > 0.8, last
        # A second call installs nothing.
        assert "-m pip install" not in run(copy, *make, "--dry-run", "demo")
    else:
        run(copy, *make, ".venv/.made")
    resolved = run(copy, ".venv/bin/python", "-m", "pip", "install", "--dry-run", "-e", ".[test]")
    # `make test` after `make demo` installs only what is not there yet.
    (installed,) = re.findall(r"^Would install .*$", resolved, re.MULTILINE)
    assert " pytest-" in installed
    assert (" tensorflow-2" in installed) is not trains
