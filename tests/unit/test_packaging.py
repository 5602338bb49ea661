"""The package's metadata and README, and the Makefile's choice of Python and of when to install."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import tfdist

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("tfdist_setup", ROOT / "setup.py")
_SETUP = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_SETUP)
readable_anywhere = _SETUP.readable_anywhere
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def test_the_version_is_the_same_everywhere() -> None:
    assert tfdist.__version__ == "0.1.0"
    assert 'version = "0.1.0"' in (ROOT / "pyproject.toml").read_text()
    assert "## [0.1.0]" in (ROOT / "CHANGELOG.md").read_text()
    assert "\nversion: 0.1.0\n" in (ROOT / "CITATION.cff").read_text()


def test_the_installed_package_has_the_command_the_types_and_the_extras() -> None:
    try:
        package = importlib.metadata.distribution("tfdist")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tfdist is not installed in this environment, only on its path")
    commands = {entry.name: entry.value for entry in package.entry_points if entry.group == "console_scripts"}
    assert commands == {"tfdist": "tfdist.launcher.command:main"}
    assert package.metadata["Requires-Python"] == ">=3.10"
    assert set(package.metadata.get_all("Provides-Extra") or ()) == {
        "gpu",
        "examples",
        "lora",
        "tune",
        "plot",
        "kubernetes",
        "bench",
        "package",
        "conformance",
        "docs",
        "test",
        "horovod-build",
    }
    assert (Path(tfdist.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("stub", sorted((ROOT / "tfdist").rglob("*.pyi")), ids=lambda stub: stub.parent.name)
def test_editors_see_the_lazy_names(stub: Path) -> None:
    package = importlib.import_module(".".join(stub.parent.relative_to(ROOT).parts))
    imports = [node for node in ast.parse(stub.read_text()).body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname: (node.module, alias.name) for node in imports for alias in node.names}
    assert set(names) == set(package.__all__)
    for name, (module, original) in names.items():
        found = importlib.import_module(module)
        assert getattr(package, name) is (getattr(found, original, None) or importlib.import_module(f"{module}.{name}"))


# --- The README on an index of packages -----------------------------------------------------------------------------

README = """See [what is exact](docs/what-is-exact.md), [below](#limits), [Keras](https://keras.io).

| [a](b.md#c) | ![plot](docs/plot.svg) |

```python
rows[first](docs/a.md)
```
"""


def test_links_of_the_readme_lead_to_the_repository() -> None:
    at = "https://example.org/o/tfdist"
    assert readable_anywhere(README, f"{at}/").splitlines() == [
        f"See [what is exact]({at}/blob/HEAD/docs/what-is-exact.md), [below]({at}/blob/HEAD/README.md#limits), "
        "[Keras](https://keras.io).",
        "",
        f"| [a]({at}/blob/HEAD/b.md#c) | ![plot]({at}/raw/HEAD/docs/plot.svg) |",
        *README.splitlines()[3:],
    ]


def test_without_an_address_of_the_repository_no_link_is_dead() -> None:
    assert readable_anywhere(README, None).splitlines() == [
        "See what is exact, below, [Keras](https://keras.io).",
        "",
        "| a | plot |",
        *README.splitlines()[3:],
    ]


# --- The Makefile ---------------------------------------------------------------------------------------------------


def fake_python(path: Path, text: str, code: int) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\nexit {code}\n")
    path.chmod(0o755)
    return path


def make(folder: Path, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    for name in ("Makefile", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder)
    # A make that runs this test would otherwise hand its own options and variables down.
    env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "PYTHON")}
    env["PATH"] = path or env["PATH"]
    command = [shutil.which("make") or "make", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


@needs_make
def test_make_refuses_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = fake_python(tmp_path / "old", '[ "$1" = --version ] && { echo "Python 3.8.18"; exit 0; }', 1)
    done = make(tmp_path, ".venv/.made", f"PYTHON={old}")
    assert done.returncode == 2
    assert f"{old} is Python 3.8.18, but tfdist needs Python 3.10 or newer" in done.stderr
    assert "make PYTHON=/path/to/python3" in done.stderr


@needs_make
def test_make_says_so_when_there_is_no_python(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sh").symlink_to("/bin/sh")
    done = make(tmp_path, ".venv/.made", path=str(tools))
    assert done.returncode == 2
    assert "no Python found. Install Python 3.10 or newer" in done.stderr


@needs_make
def test_make_takes_the_newest_python_that_runs(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sh").symlink_to("/bin/sh")
    fake_python(tools / "python3.13", "echo 'version manager: no such version' >&2", 127)
    fake_python(tools / "python3.12", "", 0)
    fake_python(tools / "python3.11", "", 0)
    done = make(tmp_path, "--dry-run", ".venv/.made", path=str(tools))
    assert '"python3.12" tools/bootstrap_venv.py .venv' in done.stdout


@needs_make
def test_make_installs_once_and_again_when_the_requirements_change(tmp_path: Path) -> None:
    venv = tmp_path / ".venv"
    venv.mkdir()
    for name in ("Makefile", "pyproject.toml", "setup.py", ".venv/.made"):
        (tmp_path / name).touch()
    make(tmp_path, "help")
    for stamp in (".made", ".test"):
        (venv / stamp).touch()
        os.utime(venv / stamp, (2e9, 2e9))
    shutil.copy(ROOT / "Makefile", tmp_path)
    assert "up to date" in make(tmp_path, "--dry-run", ".venv/.test").stdout
    os.utime(venv / ".test", (1e9, 1e9))
    assert "python tools/install.py -e '.[test]'" in make(tmp_path, "--dry-run", ".venv/.test").stdout
