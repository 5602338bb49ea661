"""Makes a virtual environment with the newest pip: `python3 tools/bootstrap_venv.py FOLDER`.

The pip that comes with Python is as old as that release. From an index that does not tell which Python a file needs, as
plain mirrors do not, pip 22 and 23.0 (Python 3.10) can try all versions of other packages, with no end in sight.

Debian and Ubuntu ship `ensurepip` only with python3-venv, which takes root to install. Without it, pip's wheel comes
from the package index that `PIP_INDEX_URL` or pip.conf names. Only the standard library is there.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from urllib.parse import urljoin, urlsplit

_HELP = "Set PIP_INDEX_URL to an index within reach, without a password, or install the package python3-venv."


def main(folder: str) -> None:
    """Makes the environment; an existing one is made again.

    Raises:
        SystemExit: if it cannot be made, with the reason.
    """
    print(f"Making {folder} with Python {sys.version.split()[0]} and the newest pip", flush=True)
    python = str(Path(folder, "bin/python"))
    venv = (sys.executable, "-m", "venv", "--clear", folder)
    if subprocess.run(venv, capture_output=True).returncode == 0:
        _run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", "pip")
        return
    _run(*venv, "--without-pip")
    print("This Python has no ensurepip: fetching pip from the package index", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            wheel = fetch_pip(Path(scratch))
        except (OSError, ValueError) as error:
            sys.exit(f"bootstrap_venv: cannot fetch pip: {error}. {_HELP}")
        # A wheel is a zip file, and Python runs a package out of a zip file: pip installs itself.
        _run(python, str(wheel / "pip"), "install", "--quiet", "--no-index", "--no-deps", str(wheel))


def fetch_pip(folder: Path) -> Path:
    """Fetches pip's newest wheel for this Python.

    Raises:
        OSError: the index is out of reach.
        ValueError: the index has no such wheel, or has sent another file than it announced.
    """
    index = _index()
    if "@" in urlsplit(index).netloc:
        raise ValueError("the index asks for a password")
    with urllib.request.urlopen(f"{index.rstrip('/')}/pip/", timeout=60) as answer:
        base, page = answer.geturl(), answer.read().decode()
    wheels = []
    for link in re.findall(r"<a\s(.*?)</a>", page, re.DOTALL):
        file = re.search(r'href="([^"]*?pip-([\d.]+)-(?:py2\.)?py3-none-any\.whl)#sha256=(\w+)"', link)
        least = re.search(r'data-requires-python="[^"]*(?:&gt;|>)=\s*3\.(\d+)', link)
        if file and "data-yanked" not in link and int(least[1] if least else 0) <= sys.version_info[1]:
            wheels.append(([int(number) for number in file[2].split(".")], urljoin(base, file[1]), file[3]))
    if not wheels:
        raise ValueError(f"{base} lists no wheel for Python {sys.version.split()[0]}")
    _, url, sha256 = max(wheels)
    with urllib.request.urlopen(url, timeout=60) as answer:
        content = answer.read()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ValueError(f"{url} is not the file that the index announced")
    wheel = folder / url.rpartition("/")[2]
    wheel.write_bytes(content)
    return wheel


def _index() -> str:
    """As pip finds it, which takes values literally: addresses may well hold per cent signs."""
    if named := os.environ.get("PIP_INDEX_URL"):
        return named
    files, home = configparser.RawConfigParser(strict=False), Path.home()
    chosen = os.environ.get("PIP_CONFIG_FILE", "/dev/null")
    files.read(["/etc/pip.conf", home / ".pip/pip.conf", home / ".config/pip/pip.conf", chosen])
    return files.get("global", "index-url", fallback="https://pypi.org/simple")


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"bootstrap_venv: {' '.join(command)} failed:\n{done.stdout.strip()}\n{_HELP}")


if __name__ == "__main__":
    main(sys.argv[1])
