"""A fresh copy of the repository works with every Python that is promised, however old the pip that comes with it.

The oldest and the newest Python train the demo; those between them only find out what they would install, as a minute
of downloading and unpacking TensorFlow each would tell nothing else. Unlike other tests, these use the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.conftest import Launch

ROOT = Path(__file__).parents[2]
# The oldest pip that comes with each: that of Ubuntu 22.04, and those of the first releases.
PIP = {"3.10": "22.0.2", "3.11": "22.3", "3.12": "23.2.1", "3.13": "24.2"}
TRAINED = ("3.10", "3.13")
DEADLINE = 550.0

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.slow,
    pytest.mark.cluster,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed"),
    pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git does not know which files belong to the repository"),
]

# What stands in for the `ensurepip` of an older release. It runs in `python -m venv` and in what that starts.
SITECUSTOMIZE = """
import subprocess, venv

def _setup_pip(self, context):
    pip = [context.env_exec_cmd, WHEEL + "/pip", "install", "--no-index", "--no-deps", WHEEL]
    subprocess.run(pip, check=True)
    open(WHEEL + ".installed", "w").close()

venv.EnvBuilder._setup_pip = _setup_pip
"""


def find_python(version: str) -> str:
    """A Python of that version that runs: in PATH, where version managers leave commands that do not, or pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = [shutil.which(f"python{version}"), *map(str, pyenv.glob(f"versions/{version}.*/bin/python"))]
    for python in filter(None, found):
        if subprocess.run([python, "-c", ""], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version} that runs, neither in PATH nor below {pyenv}/versions")


def run(folder: Path, *command: str, **variables: str) -> str:
    """Runs a command and returns what it prints, which pytest shows if the test fails."""
    log = folder.with_suffix(".log")
    # A make that runs this test would otherwise hand its options down, and have this one print where it is.
    env = {"PYTHONPATH": "", "MAKEFLAGS": "", "MAKELEVEL": "", **variables}
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


@pytest.mark.parametrize("version", PIP)
def test_a_fresh_copy_installs_and_trains(copy: Path, tmp_path: Path, version: str) -> None:
    python = find_python(version)
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(tmp_path), f"pip=={PIP[version]}"]
    if (done := subprocess.run(download, capture_output=True, text=True, timeout=DEADLINE)).returncode != 0:
        pytest.skip(f"the package index has no pip {PIP[version]}, or is out of reach: {done.stderr.strip()}")
    (wheel,) = tmp_path.glob("*.whl")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(f"WHEEL = {str(wheel)!r}\n{SITECUSTOMIZE}")

    run(copy, "make", f"PYTHON={python}", ".venv/.made", PYTHONPATH=str(tmp_path / "site"))
    assert Path(f"{wheel}.installed").exists()
    pip = ".venv/bin/python", "-m", "pip"
    assert f"pip {PIP[version]} " not in run(copy, *pip, "--version")

    if version in TRAINED:
        last = run(copy, "make", "demo", "ARGS=--epochs 3").splitlines()[-1]
        match = re.fullmatch(r"\[worker 0\] test accuracy: (0\.\d+); saved as digits\.keras", last)
        assert match and float(match[1]) > 0.8, last
        # A second call installs nothing.
        assert "tools/install.py" not in run(copy, "make", "--dry-run", "demo")

    resolved = run(copy, *pip, "install", "--dry-run", "-e", ".[test]")
    # `make test` after `make demo` installs only what is not there yet.
    (installed,) = re.findall(r"^Would install .*$", resolved, re.MULTILINE)
    assert " pytest-" in installed
    assert (" tensorflow-2" in installed) is (version not in TRAINED)
