"""What Kubeflow Trainer is told: over HTTPS, with the token of the pod, never at the cost of the training."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import strategies as st

from tests.jobs.conftest import SOURCE
from tests.jobs.kubeflow.controller import PATH, Controller, accept, reply
from tests.launcher.conftest import wait_until
from tfdist.supervision import trainjob_status
from tfdist.supervision.trainjob_status import TrainJobStatus, status_of

SCHEMA = json.loads((Path(__file__).parent / "trainjob.schema.json").read_text())
STATUS = SCHEMA["properties"]["status"]["properties"]["trainerStatus"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are a long time for a test, and five are short for a busy machine."""
    monkeypatch.setattr(trainjob_status, "_INTERVAL", 0.05)
    monkeypatch.setattr(trainjob_status, "_TIMEOUT", 60.0)


def sender(controller: Controller, **changes: str) -> TrainJobStatus:
    return TrainJobStatus(*{**controller.env, **changes}.values())


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfdist"]


def test_a_report_arrives_with_the_token_as_it_is_now(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    told = sender(controller)
    told.report(status_of(0.5, 12.7, {"loss": 0.25, "epochs": 3}, now=1769164245.0))
    controller.wait_for(1)
    controller.token.write_text("second-token==\n")
    told.report({"trainerStatus": {}})
    controller.wait_for(2)
    (headers, body), (later, _) = controller.heard
    assert (headers["Authorization"], headers["path"]) == ("Bearer first.token", PATH)
    assert headers["Content-Type"] == "application/json" and headers["Host"] == f"localhost:{controller.port}"
    assert later["Authorization"] == "Bearer second-token=="
    assert body == {
        "trainerStatus": {
            "progressPercentage": 50,
            "estimatedRemainingSeconds": 12,
            "metrics": [{"name": "loss", "value": "0.25"}, {"name": "epochs", "value": "3"}],
            "lastUpdatedTime": "2026-01-23T10:30:45Z",
        }
    }
    assert complaints(caplog) == []


def test_only_the_newest_report_is_sent(controller: Controller) -> None:
    answers = threading.Event()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        answers.wait(60)
        accept(handler)

    controller.answer = answer
    told = sender(controller)
    for number in range(1000):
        told.report({"trainerStatus": {"progressPercentage": number}})
        if number == 0:
            controller.wait_for(1)
    answers.set()
    controller.wait_for(2)
    told._finish()
    assert [body["trainerStatus"]["progressPercentage"] for _, body in controller.heard] == [0, 999]


@pytest.mark.parametrize("said", [b"HTTP/1.1 503 no \x1b[2Jleader\r\n\r\n", b"\x00garbage\r\n\r\n"])
def test_a_failure_is_said_once_and_later_reports_arrive(
    controller: Controller, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    accept, controller.answer = controller.answer, lambda handler: handler.wfile.write(said)
    told = sender(controller)
    for number in (1, 2):
        told.report({"trainerStatus": {}})
        controller.wait_for(number)
    controller.answer = accept
    told.report({"trainerStatus": {"progressPercentage": 3}})
    controller.wait_for(3)
    (line,) = complaints(caplog)
    assert line.startswith("Kubeflow does not hear how far the training is, which goes on: ")
    assert ("HTTPError" if b"503" in said else "BadStatusLine") in line and line.isprintable()


def test_neither_a_redirection_nor_a_proxy_gets_the_token(
    controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Controller(tmp_path / "elsewhere")
    # It would be trusted, too.
    controller.ca_cert.write_text(controller.ca_cert.read_text() + elsewhere.ca_cert.read_text())
    where = f"https://localhost:{elsewhere.port}{PATH}"
    try:
        for number, code in enumerate((301, 307, 308), 1):
            controller.answer = lambda handler, code=code: reply(handler, code, headers={"Location": where})
            sender(controller).report({"trainerStatus": {}})
            wait_until(lambda number=number: len(complaints(caplog)) == number, 60, "the complaint")
        assert elsewhere.heard == [] and "HTTPError" in complaints(caplog)[0]
        # The other one would have heard it.
        sender(controller, KUBEFLOW_TRAINER_SERVER_URL=where).report({"trainerStatus": {}})
        elsewhere.wait_for(1)
    finally:
        elsewhere.close()


@pytest.mark.parametrize("name", ["localhost", "other.example.com"])
def test_a_server_of_another_authority_or_name_gets_nothing(
    controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    (tmp_path / "other").mkdir()
    other = Controller(tmp_path / "other", name=name)
    trusted = controller.ca_cert if name == "localhost" else other.ca_cert
    try:
        url = f"https://localhost:{other.port}{PATH}"
        TrainJobStatus(url, str(trusted), str(controller.token)).report({"trainerStatus": {}})
        wait_until(lambda: complaints(caplog), 60, "the complaint")
        assert other.heard == [] and "CERTIFICATE_VERIFY_FAILED" in complaints(caplog)[0]
    finally:
        other.close()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("URL", "http://localhost:1/", "expected an address that begins with https://"),
        ("URL", "https://localhost:1/", "Connection refused"),
        ("CA_CERT", "/does/not/exist", "FileNotFoundError"),
        ("TOKEN", "/does/not/exist", "FileNotFoundError"),
        ("TOKEN", "ca.crt", "is no token"),
    ],
)
def test_variables_that_lead_nowhere(
    controller: Controller, caplog: pytest.LogCaptureFixture, variable: str, value: str, said: str
) -> None:
    change = {f"KUBEFLOW_TRAINER_SERVER_{variable}": value.replace("ca.crt", str(controller.ca_cert))}
    sender(controller, **change).report({"trainerStatus": {}})
    wait_until(lambda: complaints(caplog), 60, "the complaint")
    assert said in complaints(caplog)[0]
    assert controller.heard == [] and "first.token" not in caplog.text and "BEGIN CERT" not in caplog.text


PROGRAM = """
import sys, time
from tfdist.supervision import trainjob_status
trainjob_status._TIMEOUT = trainjob_status._LAST_TIMEOUT = float(sys.argv[1])
told = trainjob_status.TrainJobStatus.from_environment()
for number in (1, 99, 100):
    told.report({"trainerStatus": {"progressPercentage": number}})
    while number == 1 and told._pending:
        time.sleep(0.01)
"""


def run_to_its_end(controller: Controller, patience: float) -> None:
    env = {**controller.env, "PYTHONPATH": str(SOURCE), "PATH": ""}
    words = [sys.executable, "-c", PROGRAM, str(patience)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_program_that_ends_has_told_the_last(controller: Controller) -> None:
    run_to_its_end(controller, patience=60.0)
    told = [body["trainerStatus"]["progressPercentage"] for _, body in controller.heard]
    assert told[0] == 1 and told[-1] == 100


@pytest.mark.nightly
def test_a_slow_server_holds_nobody_up(controller: Controller) -> None:
    """The program comes to its end, and the server to none."""
    ended = threading.Event()
    controller.answer = lambda handler: ended.wait()
    run_to_its_end(controller, patience=trainjob_status._LAST_TIMEOUT)
    ended.set()


def test_outside_of_a_trainjob_nobody_is_told(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    assert TrainJobStatus.from_environment() is None
    for name, value in controller.env.items():
        monkeypatch.setenv(name, value)
    told = TrainJobStatus.from_environment()
    assert told is not None and told is TrainJobStatus.from_environment()
    for name in controller.env:
        monkeypatch.setenv(name, "")
        assert TrainJobStatus.from_environment() is None


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=1)


@hypothesis.given(
    st.none() | st.floats(0, 1),
    st.none() | st.floats(),
    st.dictionaries(st.text(max_size=100), ANYTHING, max_size=300),
    st.floats(0, 4e9),
)
@hypothesis.settings(deadline=None, max_examples=40, suppress_health_check=[hypothesis.HealthCheck.too_slow])
def test_the_custom_resource_takes_whatever_is_sent(
    fraction: float | None, left: float | None, metrics: dict[str, Any], now: float
) -> None:
    status = json.loads(json.dumps(status_of(fraction, left, metrics, now)))["trainerStatus"]
    jsonschema.validate(status, STATUS)
    # Only at the end of the fit all is done.
    assert (status.get("progressPercentage") == 100) == (fraction == 1)
    assert ("progressPercentage" in status) == (fraction is not None)


def test_the_custom_resource_does_not_take_everything() -> None:
    for broken in ({"progressPercentage": 101}, {"metrics": [{"name": "", "value": "1"}]}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, STATUS)
