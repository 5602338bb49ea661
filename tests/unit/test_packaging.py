"""The package: its metadata and README, what it imports, and the Makefile's choice of Python and of when to install."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import textwrap
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
    assert set(package.metadata.get_all("Provides-Extra") or ()) >= {
        "gpu",
        "examples",
        "lora",
        "tfds",
        "tune",
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


@pytest.mark.parametrize(
    ("address", "text", "row"),
    [
        (
            "https://example.org/o/tfdist/",
            "[what is exact]({0}blob/HEAD/docs/what-is-exact.md), [below]({0}blob/HEAD/README.md#limits)",
            "| [a]({0}blob/HEAD/b.md#c) | ![plot]({0}raw/HEAD/docs/plot.svg) |",
        ),
        (None, "what is exact, below", "| a | plot |"),
    ],
)
def test_links_of_the_readme_lead_to_the_repository_or_are_none(address: str | None, text: str, row: str) -> None:
    first, _, third, *rest = readable_anywhere(README, address).splitlines()
    assert first == f"See {text.format(address)}, [Keras](https://keras.io)."
    assert third == row.format(address)
    assert rest == README.splitlines()[3:]


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
def test_make_takes_the_newest_python_that_runs(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "sh").symlink_to("/bin/sh")
    fake_python(tools / "python3.13", "echo 'version manager: no such version' >&2", 127)
    fake_python(tools / "python3.12", "", 0)
    fake_python(tools / "python3.11", "", 0)
    done = make(tmp_path, "--dry-run", ".venv/.made", path=str(tools))
    assert '"python3.12" tools/bootstrap_venv.py .venv' in done.stdout


# --- What it imports ------------------------------------------------------------------------------------------------

UPSTREAM = ROOT / "tfdist/compat/upstream.py"
PRIVATE = ("keras.src", "tensorflow.python", "tensorflow.core", "tensorflow.compiler")


def test_private_names_are_those_of_one_file_and_each_is_used_and_explained():
    tree, used, others = ast.parse(UPSTREAM.read_text()), set(), []
    [names] = [node.value for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
    for path in {*(ROOT / "tfdist").rglob("*.py")} - {UPSTREAM}:
        if not any(name in path.read_text() for name in (*PRIVATE, "tfdist.compat.upstream")):
            continue  # parsing all takes seconds
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            others += [f"{path.relative_to(ROOT)}: {module}" for module in modules if module.startswith(PRIVATE)]
            used |= {alias.name for alias in node.names} if modules == ["tfdist.compat.upstream"] else set()
    assert others == []
    rows = re.findall(r"^\| (.+?) \|", ast.get_docstring(tree), re.MULTILINE)[1:]
    assert used == set(ast.literal_eval(names)) == {name for row in rows for name in row.split(", ")}


def test_no_tensorflow_before_it_is_needed():
    code = """
        import sys, tfdist, tfdist.cluster, tfdist.launcher.command, tfdist.testing
        import tfdist.cluster.preflight, tfdist.cluster.meeting, tfdist.cluster.ports
        import tfdist.launcher.drill.drill, tfdist.strategies.pipeline.schedule
        from tfdist.launcher.command import main
        from tfdist.testing import run_local
        tfdist.discover(), tfdist.ClusterConfig, tfdist.ClusterError, dir(tfdist), dir(tfdist.testing)
        for name in main.list_commands(None): main.get_command(None, name)
        assert not {"tensorflow", "keras", "numpy"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
