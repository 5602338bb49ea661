"""What is uploaded: the files of the wheel and of the source distribution, and tfdist installed from the wheel."""

from __future__ import annotations

import email.parser
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import tfdist
from tests.package.conftest import ROOT, run

pytestmark = pytest.mark.nightly
_INFO = f"tfdist-{tfdist.__version__}.dist-info"
# What git keeps for itself and for continuous integration.
_OF_THE_REPOSITORY = {".gitignore", ".ci/constraints.txt", ".ci/run"}


def members(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_the_wheel_has_the_package_and_nothing_else(tree: Path, wheel: Path) -> None:
    kinds = ("*.py", "*.pyi", "py.typed")
    package = {str(path.relative_to(tree)) for kind in kinds for path in (tree / "tfdist").rglob(kind)}
    about = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    assert set(members(wheel)) == package | {f"{_INFO}/{name}" for name in about}
    assert {"tfdist/py.typed", "tfdist/__init__.pyi", "tfdist/callbacks/__init__.pyi"} <= package
    assert members(wheel)[f"{_INFO}/licenses/LICENSE"] == (tree / "LICENSE").read_bytes()
    assert wheel.name == f"tfdist-{tfdist.__version__}-py3-none-any.whl"


def test_the_source_distribution_has_all_that_git_has(sdist: Path) -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this is no clone of the repository")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert tracked - packed == _OF_THE_REPOSITORY
    assert not [name for name in packed if name.endswith(".pyc") or "__pycache__" in name or ".venv" in name]


def test_the_description_needs_no_files_beside_it(wheel: Path) -> None:
    found = email.parser.BytesParser().parsebytes(members(wheel)[f"{_INFO}/METADATA"])
    text = found.get_payload()
    assert (found["Description-Content-Type"], found["Requires-Python"]) == ("text/markdown", ">=3.10")
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text)
    assert links
    assert [link for link in links if not re.match(r"https?://", link)] == []
    # Nothing but links has changed.
    assert re.findall(r"^```.*?^```", text, re.M | re.S) == re.findall(
        r"^```.*?^```", (ROOT / "README.md").read_text(), re.M | re.S
    )


def test_the_command_of_the_installed_wheel(environment: Path, tmp_path: Path) -> None:
    assert run(environment / "bin/tfdist", "--version", folder=tmp_path) == f"tfdist {tfdist.__version__}\n"
    where = run(environment / "bin/python", "-c", "import tfdist; print(tfdist.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(environment)


@pytest.mark.slow
@pytest.mark.cluster
def test_the_installed_wheel_trains_on_two_workers(environment: Path, tmp_path: Path) -> None:
    script = shutil.copy(ROOT / "examples/train_digits.py", tmp_path)
    words = ("run", "-n", "2", "--log-dir", "logs", script, "--epochs", "2")
    output = run(environment / "bin/tfdist", *words, folder=tmp_path)
    assert re.search(r"test accuracy: 0\.[5-9]", output), output
    assert (tmp_path / "digits.keras").exists()
    log = "".join(path.read_text() for path in (tmp_path / "logs").rglob("*.log"))
    assert "test accuracy" in log
    assert str(ROOT) not in log  # such as in a warning: the tfdist of the repository was not used
