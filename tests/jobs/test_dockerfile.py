"""The image for the manifests: what it copies is there and not ignored, and its user is theirs."""

from __future__ import annotations

import re
from pathlib import Path

from tfdist.jobs.kubernetes import USER

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "docker/Dockerfile").read_text().splitlines() if line and not line.startswith("#")]


def words(instruction: str) -> list[list[str]]:
    return [line.split()[1:] for line in LINES if line.startswith(f"{instruction} ")]


def test_it_runs_as_the_user_of_the_manifests() -> None:
    assert words("USER") == [[f"{USER}:{USER}"]]
    assert f"RUN useradd --uid {USER} --create-home trainer" in LINES
    # Its folder is its own: model.save("model.keras").
    made = LINES.index(f"RUN install --directory --owner={USER} --group={USER} /app")
    assert made < LINES.index("WORKDIR /app") < LINES.index(f"USER {USER}:{USER}")
    # Nothing runs as root after that.
    assert not any(line.startswith(("RUN", "COPY")) for line in LINES[LINES.index(f"USER {USER}:{USER}") :])


def test_what_it_copies_is_there_and_not_ignored() -> None:
    ignored = (ROOT / "docker/Dockerfile.dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    copied = [name for line in words("COPY") if not line[0].startswith("--") for name in line[:-1]]
    assert copied == ["pyproject.toml", "setup.py", "README.md", "LICENSE", "tfdist"]
    for name in copied:
        assert (ROOT / name).exists() and f"!{name}" in ignored
    # What the build of the package reads besides.
    project = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r'^(?:readme = "|license-files = \[")([^"]+)"', project, re.MULTILINE)) <= set(copied)


def test_it_is_small() -> None:
    assert [line[0] for line in words("FROM")] == ["python:${PYTHON}-slim"] * 2
    assert all("--no-cache-dir" in line for line in LINES if "pip install" in line)
