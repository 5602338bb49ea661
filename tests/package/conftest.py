"""The wheel and the source distribution, built once from a copy of the tree, and an environment with the wheel."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv*", ".*_cache", ".hypothesis", ".gpu", "__pycache__"),
    *("build", "dist", "site", "*.egg-info", "tfdist-logs"),
)


def run(*command: str | Path, folder: Path) -> str:
    """Runs a command outside of the repository's environment; returns its output, and fails with it."""
    ours = ("PYTHON", "TFDIST", "VIRTUAL_ENV")
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith(ours)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stdout}"
    return done.stdout


def build(source: Path, out: Path, *options: str) -> None:
    """Builds as `make package` does; nothing is fetched if a setuptools is installed that is new enough."""
    if int(importlib.metadata.version("setuptools").partition(".")[0]) >= 77:
        options = ("--no-isolation", *options)
    run(sys.executable, "-m", "build", *options, "--outdir", out, source, folder=out.parent)


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: building leaves files behind, and the tests of others run at the same time."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("package") / "tree", ignore=_LEFT_OUT)


@pytest.fixture(scope="session")
def built(tree: Path) -> Path:
    """The folder with the source distribution and the wheel that is made from it."""
    pytest.importorskip("build", reason="build is not installed: pip install build")
    out = tree.parent / "dist"
    build(tree, out)
    return out


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    """The wheel."""
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="session")
def sdist(built: Path) -> Path:
    """The source distribution."""
    (found,) = built.glob("*.tar.gz")
    return found


@pytest.fixture(scope="session")
def environment(wheel: Path) -> Path:
    """An environment with the wheel, and with what it needs from this one but for its tfdist."""
    folder = wheel.parents[1] / "environment"
    venv.create(folder, symlinks=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # A .pth file in the folder that is added is not read: the tfdist of this environment, where it is an editable one,
    # stays out.
    installed = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    Path(own, "installed.pth").write_text("".join(f"{path}\n" for path in installed))
    options = ("--no-deps", "--no-index", "--ignore-installed", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", folder, "install", *options, wheel, folder=folder)
    return folder
