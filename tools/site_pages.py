"""A hook of MkDocs: pages keep the paths that they have in the repository, so that their links lead somewhere, too.

Pages outside of docs/ are in the site as well, and so is what they link to: there is no address elsewhere to point at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parent.parent
_OUTSIDE = (
    "*.md",
    "LICENSE",
    "benchmarks/**/README.md",
    "benchmarks/memory/liveness.py",
    "docker/Dockerfile",
    "examples/*.ipynb",
    "examples/*.py",
    "examples/README.md",
    "examples/kubeflow/*.yaml",
    "tests/memory/test_held.py",
)


def on_files(files: Files, config: Any) -> Files:
    """Names all files by their paths from the root of the repository, and adds those from outside of docs/."""
    paths = sorted({path for pattern in (*_OUTSIDE, "docs/**/*") for path in _ROOT.glob(pattern) if path.is_file()})
    ours = [File.generated(config, str(path.relative_to(_ROOT)), abs_src_path=str(path)) for path in paths]
    return Files([*(file for file in files if not file.abs_src_path.startswith(config.docs_dir)), *ours])
