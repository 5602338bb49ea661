"""How an environment is made where Python came without `ensurepip`: which pip is taken from a package index."""

from __future__ import annotations

import functools
import hashlib
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools import bootstrap_venv

NEWEST = "pip-50.1-py3-none-any.whl"
# In the place of pip's: it notes how it was run.
TINY_PIP = "import os, sys\nopen(os.path.join(sys.prefix, 'ran'), 'w').write(' '.join(sys.argv[1:]))"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of an index that serves, with a wheel in it, while `venv` fails as Debian's does."""
    real = subprocess.run

    def run(command: tuple[str, ...], **options: object) -> subprocess.CompletedProcess[str]:
        if "venv" in command and "--without-pip" not in command:
            return subprocess.CompletedProcess(command, 1, "ensurepip is not available")
        return real(command, **options)

    monkeypatch.setattr(bootstrap_venv.subprocess, "run", run)
    folder = tmp_path / "simple" / "pip"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / NEWEST, "w") as archive:
        archive.writestr("pip/__main__.py", TINY_PIP)
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
        yield folder
        server.shutdown()


def link(name: str, sha256: str, more: str = "") -> str:
    return f'<a href="{name}#sha256={sha256}" {more}>{name}</a>\n'


def test_the_newest_wheel_for_this_python_is_taken(index: Path, tmp_path: Path) -> None:
    others = [
        link("pip-9.0.3-py2.py3-none-any.whl", "aa"),
        link("pip-99.0-py3-none-any.whl", "cc", 'data-requires-python="&gt;=3.40"'),
        link("pip-98.0-py3-none-any.whl", "cc", 'data-yanked="broken"'),
        link("pip-97.0b1-py3-none-any.whl", "cc"),
        link("pip-95.0.tar.gz", "cc"),
    ]
    right = link(NEWEST, hashlib.sha256((index / NEWEST).read_bytes()).hexdigest(), 'data-requires-python=">=3.9"')
    (index / "index.html").write_text("".join([*others, right]))
    bootstrap_venv.main(str(tmp_path / "venv"))
    ran = (tmp_path / "venv" / "ran").read_text()
    assert ran.startswith("install --quiet --no-index --no-deps /") and ran.endswith(f"/{NEWEST}")


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("<html></html>", "lists no wheel for Python 3"),
        (link("pip-60.0-py3-none-any.whl", "00"), "HTTP Error 404"),
        (link(NEWEST, "00"), "is not the file that the index announced"),
    ],
)
def test_what_is_wrong_with_an_index_is_said(index: Path, tmp_path: Path, page: str, problem: str) -> None:
    (index / "index.html").write_text(page)
    with pytest.raises(SystemExit, match=rf"cannot fetch pip: .*{problem}.*PIP_INDEX_URL.*python3-venv"):
        bootstrap_venv.main(str(tmp_path / "venv"))
