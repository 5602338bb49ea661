"""How an environment is made: pip's configuration, the package index, the newest pip, and what it shows meanwhile."""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bootstrap_venv
import install
import package_index
import pip_settings

# --- pip's configuration --------------------------------------------------------------------------------------------


def test_pip_settings_come_from_variables_then_files_then_defaults(tmp_path: Path) -> None:
    folder = tmp_path / ".config" / "pip"
    folder.mkdir(parents=True)
    (folder / "pip.conf").write_text(
        "[global]\nindex-url = https://files.example/%40/simple\ntrusted-host = a.example b.example:8443\n"
        "cert = /ca.pem\n[install]\nproxy = http://proxy:3128\n"
    )
    settings = pip_settings.read_settings({}, tmp_path)
    assert settings.index_url == "https://files.example/%40/simple"
    assert settings.cert == "/ca.pem"
    assert settings.proxy == "http://proxy:3128"
    assert settings.trusts("a.example", None) and settings.trusts("b.example", 8443)
    assert not settings.trusts("b.example", 443)
    from_variable = pip_settings.read_settings({"PIP_INDEX_URL": "https://variable.example/simple/"}, tmp_path)
    assert from_variable.project_url("pip") == "https://variable.example/simple/pip/"
    nothing = pip_settings.read_settings({"PIP_CONFIG_FILE": "/dev/null"}, tmp_path)
    assert nothing == pip_settings.PipSettings(index_url="https://pypi.org/simple")


def test_a_chosen_configuration_file_overrides_the_others(tmp_path: Path) -> None:
    files = pip_settings.config_files({"PIP_CONFIG_FILE": "/chosen.conf", "XDG_CONFIG_DIRS": "/a:/b"}, tmp_path)
    assert [str(path) for path in files] == [
        "/a/pip/pip.conf",
        "/b/pip/pip.conf",
        "/etc/pip.conf",
        f"{tmp_path}/.pip/pip.conf",
        f"{tmp_path}/.config/pip/pip.conf",
        "/chosen.conf",
    ]


def test_credentials_go_into_the_header_and_never_into_messages() -> None:
    index = "https://me:se%40cret@index.example/simple"
    plain, headers = package_index.split_credentials(index + "/pip/", index)
    assert plain == "https://index.example/simple/pip/"
    assert headers == {"Authorization": "Basic bWU6c2VAY3JldA=="}
    assert package_index.split_credentials("https://index.example/pip.whl", index)[1] == headers
    assert package_index.split_credentials("https://files.example/pip.whl", index)[1] == {}
    assert pip_settings.PipSettings(index_url=index).public_index_url == "https://index.example/simple"


# --- The package index ----------------------------------------------------------------------------------------------

HTML = """
<a href="../../f/pip-9.0.3-py2.py3-none-any.whl#sha256=aa">pip-9.0.3-py2.py3-none-any.whl</a>
<a href="../../f/pip-24.0-py3-none-any.whl#sha256=bb" data-requires-python="&gt;=3.7">pip-24.0-py3-none-any.whl</a>
<a href="../../f/pip-99.0-py3-none-any.whl#sha256=cc" data-requires-python="&gt;=3.40">pip-99.0-py3-none-any.whl</a>
<a href="../../f/pip-98.0-py3-none-any.whl#sha256=cc" data-yanked="broken">pip-98.0-py3-none-any.whl</a>
<a href="../../f/pip-97.0b1-py3-none-any.whl#sha256=cc">pip-97.0b1-py3-none-any.whl</a>
<a href="../../f/pip-96.0-py3-none-any.whl">pip-96.0-py3-none-any.whl</a>
<a href="../../f/pip-95.0.tar.gz#sha256=cc">pip-95.0.tar.gz</a>
"""


def test_the_newest_wheel_for_this_python_is_chosen_from_html() -> None:
    wheels = package_index.parse_html(HTML, "https://index.example/simple/pip/")
    best = package_index.newest_wheel(wheels, (3, 11))
    assert best == package_index.Wheel(
        "pip-24.0-py3-none-any.whl", "https://index.example/f/pip-24.0-py3-none-any.whl", "bb", ">=3.7"
    )
    assert package_index.newest_wheel(wheels, (3, 6)).filename == "pip-9.0.3-py2.py3-none-any.whl"


def test_the_newest_wheel_for_this_python_is_chosen_from_json() -> None:
    def file(version: str, **more: object) -> dict[str, object]:
        name = f"pip-{version}-py3-none-any.whl"
        return {"filename": name, "url": f"/f/{name}", "hashes": {"sha256": "dd"}, **more}

    page = {
        "files": [
            file("9.1"),
            file("26.3", **{"requires-python": ">=3.10"}),
            file("27.0", yanked=True),
            file("28.0", **{"requires-python": ">=3.30"}),
        ]
    }
    wheels = package_index.parse_json(json.dumps(page), "https://index.example/simple/pip/")
    best = package_index.newest_wheel(wheels, (3, 12))
    assert best is not None and best.url == "https://index.example/f/pip-26.3-py3-none-any.whl"
    with pytest.raises(ValueError, match=r"is not a page of a package index"):
        package_index.parse_json("{}", "https://index.example/simple/pip/")


@pytest.mark.parametrize(
    ("clause", "python", "expected"),
    [
        ("", (3, 11), True),
        (">=3.10", (3, 9), False),
        (">=3.10", (3, 10), True),
        (">=3.10.2", (3, 10), True),
        (">=2.7,!=3.0.*,!=3.1.*", (3, 10), True),
        (">=2.7,!=3.0.*,!=3.10.*", (3, 10), False),
        (">=3", (3, 11), True),
        ("<4", (3, 11), True),
        ("<3.11", (3, 11), False),
        (">3.10", (3, 10), False),
        ("<=3.11", (3, 11), True),
        ("==3.*", (3, 11), True),
        ("==3.10.*", (3, 11), False),
        ("~=3.9", (3, 12), True),
        ("~=3.9", (4, 0), False),
        ("whatever", (3, 11), False),
    ],
)
def test_requires_python(clause: str, python: tuple[int, int], expected: bool) -> None:
    assert package_index.supports(clause, python) is expected


# --- Installing pip -------------------------------------------------------------------------------------------------


@pytest.fixture
def tiny_pip(tmp_path: Path) -> Path:
    """A wheel in the place of pip's: it notes how it was run, and fails if it is told to."""
    wheel = tmp_path / "pip-50.1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pip/__init__.py", "")
        archive.writestr(
            "pip/__main__.py",
            "import os, sys\nopen(os.path.join(sys.prefix, 'ran'), 'w').write(' '.join(sys.argv[1:]))\n"
            "sys.exit(os.environ.get('TINY_PIP_FAILS'))\n",
        )
    return wheel


@pytest.fixture
def serve() -> Iterator[object]:
    """Starts a package index over HTTP: a mapping from path to (type, content)."""
    servers: list[ThreadingHTTPServer] = []

    def start(pages: dict[str, tuple[str, bytes]]) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path not in pages:
                    self.send_error(404)
                    return
                kind, content = pages[self.path]
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}/simple"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def no_ensurepip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `venv` fail as Debian's does without python3-venv, unless it is asked for an environment without pip."""
    real = bootstrap_venv._venv

    def venv(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
        if "--without-pip" in options:
            return real(folder, *options)
        return subprocess.CompletedProcess([], 1, stdout="ensurepip is not available")

    monkeypatch.setattr(bootstrap_venv, "_venv", venv)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("http_proxy", "HTTP_PROXY", "PIP_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_ensurepip")
@pytest.mark.parametrize("kind", ["html", "json"])
def test_pip_is_fetched_when_there_is_no_ensurepip(tmp_path, tiny_pip, serve, monkeypatch, capsys, kind: str) -> None:
    content = tiny_pip.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if kind == "html":
        page = ("text/html", f'<a href="../../f/{tiny_pip.name}#sha256={digest}">{tiny_pip.name}</a>'.encode())
    else:
        files = [{"filename": tiny_pip.name, "url": f"../../f/{tiny_pip.name}", "hashes": {"sha256": digest}}]
        page = ("application/vnd.pypi.simple.v1+json", json.dumps({"files": files}).encode())
    url = serve({"/simple/pip/": page, f"/f/{tiny_pip.name}": ("application/zip", content)})
    monkeypatch.setenv("PIP_INDEX_URL", url)
    assert bootstrap_venv.main([str(tmp_path / "venv")]) == 0
    assert f"fetching pip from {url}" in capsys.readouterr().out
    ran = (tmp_path / "venv" / "ran").read_text()
    assert ran.startswith("install --quiet --no-index --no-deps /") and ran.endswith(f"/{tiny_pip.name}")


@pytest.mark.usefixtures("no_ensurepip")
def test_an_altered_pip_is_refused(tmp_path, tiny_pip, serve, monkeypatch, capsys) -> None:
    page = f'<a href="../../f/{tiny_pip.name}#sha256={"0" * 64}">{tiny_pip.name}</a>'.encode()
    content = tiny_pip.read_bytes()
    pages = {"/simple/pip/": ("text/html", page), f"/f/{tiny_pip.name}": ("application/zip", content)}
    monkeypatch.setenv("PIP_INDEX_URL", serve(pages))
    assert bootstrap_venv.main([str(tmp_path / "venv")]) == 1
    message = capsys.readouterr().err
    assert f"has sha256 {hashlib.sha256(content).hexdigest()}, but the index announced {'0' * 64}" in message
    assert not (tmp_path / "venv" / "ran").exists()


@pytest.mark.usefixtures("no_ensurepip")
@pytest.mark.parametrize(
    ("pages", "problem"),
    [
        ({"/simple/pip/": ("text/html", b"<html></html>")}, "{} lists no pip wheel"),
        ({}, "cannot fetch pip from {}: HTTP Error 404"),
    ],
)
def test_an_index_without_pip_is_named_with_the_remedies(tmp_path, serve, monkeypatch, capsys, pages, problem) -> None:
    url = serve(pages)
    monkeypatch.setenv("PIP_INDEX_URL", url)
    assert bootstrap_venv.main([str(tmp_path / "venv")]) == 1
    message = capsys.readouterr().err
    assert problem.format(url) in message
    assert "PIP_INDEX_URL" in message and "python3-venv" in message


# --- Bringing pip up to date ----------------------------------------------------------------------------------------


@pytest.fixture
def ensurepip(tiny_pip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `tiny_pip` the pip that comes with this Python."""
    real = bootstrap_venv._venv

    def venv(folder: Path) -> subprocess.CompletedProcess[str]:
        done = real(folder, "--without-pip")
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "pip.pth").write_text(f"{tiny_pip}\n")
        return done

    monkeypatch.setattr(bootstrap_venv, "_venv", venv)


@pytest.mark.usefixtures("ensurepip")
def test_the_pip_that_comes_with_python_brings_itself_up_to_date(tmp_path: Path) -> None:
    assert bootstrap_venv.main([str(tmp_path / "venv")]) == 0
    assert (tmp_path / "venv" / "ran").read_text() == "install --quiet --disable-pip-version-check --upgrade pip"


@pytest.mark.usefixtures("ensurepip")
def test_a_pip_that_refuses_to_install_is_quoted_with_the_remedy(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TINY_PIP_FAILS", "ERROR: a hash is missing")
    assert bootstrap_venv.main([str(tmp_path / "venv")]) == 1
    message = capsys.readouterr().err
    assert "pip could not bring itself up to date:\nERROR: a hash is missing\n" in message
    assert f"{tmp_path}/venv/bin/python -m pip config debug" in message


# --- What is shown while packages are installed ---------------------------------------------------------------------

PIP_PRINTS = """\
Obtaining file:///repository
  Installing build dependencies: finished with status 'done'
Collecting tensorflow>=2.20 (from tfdist==0.1.0)
  Downloading tensorflow-2.21.0-cp311-cp311-manylinux_2_27_x86_64.whl.metadata (4.5 kB)
  Downloading tensorflow-2.21.0-cp311-cp311-manylinux_2_27_x86_64.whl (572.4 MB)
Progress 0 of 572400000
Progress 286200000 of 572400000
Collecting click (from tfdist==0.1.0)
  Using cached click-8.5.1-py3-none-any.whl (126 kB)
Requirement already satisfied: six in /venv
Installing collected packages: click, tensorflow, tfdist
Successfully installed click-8.5.1 tensorflow-2.21.0 tfdist-0.1.0
"""


def displayed(live: bool) -> str:
    stream = io.StringIO()
    install.Display(stream, live).show(PIP_PRINTS.splitlines(keepends=True))
    return re.sub(r" +\d+ s ", " ", stream.getvalue())


def test_without_a_terminal_there_is_a_line_for_each_large_step() -> None:
    assert displayed(live=False).splitlines() == [" downloading tensorflow 2.21.0, 572 MB", " unpacking 3 packages"]


def test_on_a_terminal_one_line_says_how_far_it_is() -> None:
    rows = [row.rstrip() for row in re.split(r"[\r\n]", displayed(live=True))]
    assert " downloading tensorflow 2.21.0: 286 of 572 MB" in rows
    assert " looking for click" in rows and " using cached click 8.5.1" in rows
    assert rows[-2:] == [" unpacking 3 packages", ""]


@pytest.mark.parametrize(
    ("version", "live", "bar"), [("26.3", True, "raw"), ("24.0", True, "off"), ("26", False, "off")]
)
def test_only_new_pips_tell_how_far_they_are(version: str, live: bool, bar: str) -> None:
    assert install.progress_bar(version, live) == bar


def test_the_size_is_announced() -> None:
    assert install.announcement(["-e", ".[examples]"], has_tensorflow=True) == "Installing .[examples]"
    assert "700 MB to download" in install.announcement(["-e", ".[examples]"], has_tensorflow=False)
    assert "several GB" in install.announcement(["-e", ".[bench]"], has_tensorflow=True)


def test_the_exit_code_and_the_errors_are_those_of_pip(tmp_path: Path) -> None:
    command = [sys.executable, install.__file__, "--no-index", str(tmp_path / "nothing-there")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "ERROR" in done.stderr and "nothing-there" in done.stderr
    assert done.stdout.splitlines() == [f"Installing {tmp_path}/nothing-there"]
