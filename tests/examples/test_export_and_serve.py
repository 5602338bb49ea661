"""The example of an exported model: what a server answers is what the model predicts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAME = "export_and_serve.py"

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def needs_images() -> None:
    pytest.importorskip("sklearn", reason="needs the extra `examples`")


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A server in a process of its own; gives its address."""
    command = [sys.executable, NAME, "--serve", "--port", "0"]
    with open(folder / "server.log", "w") as log:
        server = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = server.stdout.readline()
        assert line.startswith("serving http://127.0.0.1:"), (folder / "server.log").read_text()[-3000:]
        yield line.split()[1]
    finally:
        server.kill()
        server.wait(30)
        server.stdout.close()


def ask(address: str, content: bytes | None = None) -> tuple[int, Any]:
    """The code and the JSON of an answer."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, content), timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.nightly
def test_the_server_speaks_as_tensorflow_serving(example, tmp_path: Path) -> None:
    assert "served has no exported model" in example(NAME, "--serve", fails=True)
    printed = example(NAME, "--epochs=2", run=["-n", "2"])
    ((difference,),) = [re.findall(r"^served predictions differ by (\S+) at most$", printed, re.MULTILINE)]
    assert float(difference) < 1e-5
    ((accuracy,),) = [re.findall(r"^test accuracy: ([\d.]+); exported: served/1$", printed, re.MULTILINE)]
    assert float(accuracy) > 0.8
    with serving(tmp_path) as address:
        status = {"error_code": "OK", "error_message": ""}
        state = {"version": "1", "state": "AVAILABLE", "status": status}
        assert ask(address) == (200, {"model_version_status": [state]})
        image = [[[float(row * column % 17)] for column in range(8)] for row in range(8)]
        code, answer = ask(f"{address}:predict", json.dumps({"instances": [image, image]}).encode())
        assert code == 200
        first, second = answer["predictions"]
        assert sum(first) == pytest.approx(1.0, abs=1e-5)
        assert first == pytest.approx(second, abs=1e-6)
        blank = [[[0.0]] * 8] * 8
        _, other = ask(f"{address}:predict", json.dumps({"instances": [blank]}).encode())
        assert other["predictions"][0] != pytest.approx(first, abs=1e-3)

        for wrong in (b"{", b"[]", b'{"instances": 1}', b'{"instances": [[1, 2]]}', b'{"instances": [["a"]]}'):
            code, answer = ask(f"{address}:predict", wrong)
            assert (code, list(answer)) == (400, ["error"]), wrong
        assert ask(address.replace("digits", "letters"))[0] == 404
        assert ask(address, b"{}")[0] == 404
        # A wrong request does not end it.
        assert ask(address)[0] == 200
