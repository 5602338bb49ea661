"""What Kubeflow Trainer is told: over HTTPS, with the token of the pod, never at the cost of the training."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import hypothesis
import jsonschema
import pytest
from hypothesis import strategies as st

from tests.jobs.kubeflow.controller import PATH, Controller, accept, reply
from tfdist.supervision import trainjob_status
from tfdist.supervision.remaining import fraction_done, steps_left
from tfdist.supervision.trainjob_status import TrainJobStatus, status_of

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((Path(__file__).parent / "trainjob.schema.json").read_text())
STATUS = SCHEMA["properties"]["status"]["properties"]["trainerStatus"]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds are a long time for a test."""
    monkeypatch.setattr(trainjob_status, "_INTERVAL", 0.05)
    monkeypatch.setattr(trainjob_status, "_LONGEST_INTERVAL", 0.1)


def sender(controller: Controller) -> TrainJobStatus:
    return TrainJobStatus(*controller.env.values())


def wait_until(condition: Any, deadline: float = 60.0) -> None:
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tfdist"]


def test_a_report_arrives_with_the_token(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    status = status_of(0.5, 12.7, {"loss": 0.25, "epochs": 3}, now=1769164245.0)
    sender(controller).report(status)
    controller.wait_for(1)
    ((headers, body),) = controller.heard
    assert (headers["Authorization"], headers["path"]) == ("Bearer first.token", PATH)
    assert headers["Content-Type"] == "application/json" and headers["Host"] == f"localhost:{controller.port}"
    assert body == {
        "trainerStatus": {
            "progressPercentage": 50,
            "estimatedRemainingSeconds": 12,
            "metrics": [{"name": "loss", "value": "0.25"}, {"name": "epochs", "value": "3"}],
            "lastUpdatedTime": "2026-01-23T10:30:45Z",
        }
    }
    assert complaints(caplog) == []


def test_the_token_is_read_again_and_the_authority_too(controller: Controller) -> None:
    told = sender(controller)
    for number, token in enumerate(["first.token", "second.token", "third-token=="], 1):
        controller.token.write_text(f"{token}\n")
        told.report({"trainerStatus": {}})
        controller.wait_for(number)
    assert [headers["Authorization"] for headers, _ in controller.heard] == [
        *("Bearer first.token", "Bearer second.token", "Bearer third-token=="),
    ]


def test_only_the_newest_report_is_sent(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainjob_status, "_INTERVAL", 1.0)
    told = sender(controller)
    for number in range(1000):
        told.report({"trainerStatus": {"progressPercentage": number}})
    wait_until(lambda: controller.heard and controller.heard[-1][1]["trainerStatus"]["progressPercentage"] == 999)
    assert len(controller.heard) <= 3


def test_the_last_report_of_a_fit_does_not_wait(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainjob_status, "_INTERVAL", 1000.0)
    told = sender(controller)
    told.report({"trainerStatus": {"progressPercentage": 1}})
    controller.wait_for(1)
    told.report({"trainerStatus": {"progressPercentage": 2}})
    told.report({"trainerStatus": {"progressPercentage": 100}}, is_last=True)
    controller.wait_for(2)
    assert controller.heard[-1][1] == {"trainerStatus": {"progressPercentage": 100}}


def fail_twice(controller: Controller) -> Any:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        if len(controller.heard) <= 2:
            reply(handler, 503, b'{"kind": "Status", "message": "no \\u001b[2Jleader"}')
        else:
            accept(handler)

    return answer


def test_a_report_that_was_not_taken_is_sent_again(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    controller.answer = fail_twice(controller)
    sender(controller).report({"trainerStatus": {"progressPercentage": 100}}, is_last=True)
    controller.wait_for(3)
    time.sleep(0.5)
    assert [body["trainerStatus"] for _, body in controller.heard] == [{"progressPercentage": 100}] * 3
    (said,) = complaints(caplog)
    assert said == (
        "Kubeflow does not hear how far the training is, which goes on: localhost answered 503: "
        "no \\x1b[2Jleader. This is said once."
    )


@pytest.mark.parametrize(
    ("code", "body", "said"),
    [
        (403, b'{"message": "Forbidden"}', "answered 403: Forbidden."),
        (422, b'{"message": ["no text"]}', 'answered 422: {"message": ["no text"]}.'),
        pytest.param(500, b"\xff\x00" * 100000, "answered 500: ", id="binary"),
        pytest.param(500, b"[" * 100000, "answered 500: [[[", id="brackets"),
        (404, b"", "answered 404."),
    ],
)
def test_errors_are_said_once(
    controller: Controller, caplog: pytest.LogCaptureFixture, code: int, body: bytes, said: str
) -> None:
    controller.answer = lambda handler: reply(handler, code, body)
    told = sender(controller)
    told.report({"trainerStatus": {}})
    controller.wait_for(3)
    told.report({"trainerStatus": {}})
    controller.wait_for(5)
    (line,) = complaints(caplog)
    assert said in line and line.isprintable() and len(line) < 500


def test_garbage_is_no_answer(controller: Controller, caplog: pytest.LogCaptureFixture) -> None:
    controller.answer = lambda handler: handler.wfile.write(b"\x00garbage\r\n\r\n")
    sender(controller).report({"trainerStatus": {}})
    wait_until(lambda: complaints(caplog))
    assert f"localhost:{controller.port} cannot be reached: BadStatusLine: " in complaints(caplog)[0]


def test_a_redirection_does_not_get_the_token(
    controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Controller(tmp_path / "elsewhere")
    # It would be trusted, too.
    controller.ca_cert.write_text(controller.ca_cert.read_text() + elsewhere.ca_cert.read_text())
    where = f"https://localhost:{elsewhere.port}{PATH}"
    try:
        for code in (301, 307, 308):
            controller.answer = lambda handler, code=code: reply(handler, code, headers={"Location": where})
            sender(controller).report({"trainerStatus": {}})
            controller.wait_for(3)
            controller.heard.clear()
        assert elsewhere.heard == []
        assert "localhost answered 301, and redirections are not followed." in complaints(caplog)[0]
        # The other one would have heard it.
        TrainJobStatus(where, str(controller.ca_cert), str(controller.token)).report({"trainerStatus": {}})
        elsewhere.wait_for(1)
    finally:
        elsewhere.close()


def test_a_proxy_does_not_get_it(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    sender(controller).report({"trainerStatus": {}})
    controller.wait_for(1)


def test_a_server_of_another_authority_or_name_gets_nothing(
    controller: Controller, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, name in enumerate(("localhost", "other.example.com")):
        folder = tmp_path / str(number)
        folder.mkdir()
        other = Controller(folder, name=name)
        trusted = controller.ca_cert if number == 0 else other.ca_cert
        try:
            url = f"https://localhost:{other.port}{PATH}"
            TrainJobStatus(url, str(trusted), str(controller.token)).report({"trainerStatus": {}})
            wait_until(lambda number=number: len(complaints(caplog)) > number)
            assert other.heard == [] and "CERTIFICATE_VERIFY_FAILED" in complaints(caplog)[number]
        finally:
            other.close()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"KUBEFLOW_TRAINER_SERVER_URL": "http://localhost:1/"}, "expected an address that begins with https://"),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "http://me:secret@localhost:1/"}, "_URL=http://localhost...; expected an"),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "https://localhost:x/"}, "received KUBEFLOW_TRAINER_SERVER_URL that is no"),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "https://me:secret/@host/"}, "received KUBEFLOW_TRAINER_SERVER_URL that is"),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "https://[localhost/"}, "received KUBEFLOW_TRAINER_SERVER_URL that is no"),
        ({"KUBEFLOW_TRAINER_SERVER_URL": "https://localhost:1/"}, "localhost:1 cannot be reached: ConnectionRefused"),
        ({"KUBEFLOW_TRAINER_SERVER_CA_CERT": "/does/not/exist"}, "KUBEFLOW_TRAINER_SERVER_CA_CERT=/does/not/exist"),
        ({"KUBEFLOW_TRAINER_SERVER_CA_CERT": "TOKEN"}, "cannot be used"),
        ({"KUBEFLOW_TRAINER_SERVER_TOKEN": "/does/not/exist"}, "KUBEFLOW_TRAINER_SERVER_TOKEN=/does/not/exist cannot"),
        ({"KUBEFLOW_TRAINER_SERVER_TOKEN": "/"}, "KUBEFLOW_TRAINER_SERVER_TOKEN=/ cannot be read: "),
    ],
)
def test_variables_that_lead_nowhere(
    controller: Controller, caplog: pytest.LogCaptureFixture, change: dict[str, str], said: str
) -> None:
    env = {name: str(controller.token) if value == "TOKEN" else value for name, value in change.items()}
    TrainJobStatus(*{**controller.env, **env}.values()).report({"trainerStatus": {}})
    wait_until(lambda: complaints(caplog))
    assert said in complaints(caplog)[0]
    assert controller.heard == [] and "first.token" not in caplog.text and "secret" not in caplog.text


@pytest.mark.parametrize(
    "text", ["", "two words", "a\r\nHost: elsewhere", "caf\u00e9", pytest.param("x" * 100000, id="long")]
)
def test_what_is_no_token_is_not_sent_and_not_shown(
    controller: Controller, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    controller.token.write_text(text, newline="")
    sender(controller).report({"trainerStatus": {}})
    wait_until(lambda: complaints(caplog))
    assert complaints(caplog)[0].endswith(f"what is in KUBEFLOW_TRAINER_SERVER_TOKEN={controller.token} is no token. "
                                          "This is said once.")  # fmt: skip
    assert controller.heard == []


def test_a_slow_server_holds_nobody_up(
    controller: Controller, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trainjob_status, "_WHOLE_TIMEOUT", 1.0)

    def drip(handler: BaseHTTPRequestHandler) -> None:
        for _ in range(600):
            handler.wfile.write(b"H")
            time.sleep(0.1)

    controller.answer = drip
    told = sender(controller)
    begin = time.thread_time()
    for _ in range(1000):
        told.report({"trainerStatus": {}})
    assert time.thread_time() - begin < 1.0
    # It is hung up on after a second, though it says something all the time.
    wait_until(lambda: complaints(caplog))
    assert "cannot be reached" in complaints(caplog)[0]
    controller.wait_for(2)


PROGRAM = """
import sys, time
from tfdist.supervision.trainjob_status import TrainJobStatus
told = TrainJobStatus.from_environment()
told.report({"trainerStatus": {"progressPercentage": 1}})
time.sleep(float(sys.argv[1]))
told.report({"trainerStatus": {"progressPercentage": 99}})
told.report({"trainerStatus": {"progressPercentage": 100}}, is_last=True)
"""


def run_to_its_end(controller: Controller) -> float:
    begin = time.monotonic()
    command = [sys.executable, "-c", PROGRAM, "0.5"]
    env = {**controller.env, "PYTHONPATH": str(ROOT), "PATH": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return time.monotonic() - begin


def test_a_program_that_ends_has_told_the_last(controller: Controller) -> None:
    run_to_its_end(controller)
    told = [body["trainerStatus"]["progressPercentage"] for _, body in controller.heard]
    assert told[0] == 1 and told[-1] == 100


@pytest.mark.exhaustive
def test_a_program_ends_though_nobody_answers(controller: Controller) -> None:
    controller.answer = lambda handler: time.sleep(600)
    assert run_to_its_end(controller) < 90


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
    status = json.loads(json.dumps(status_of(fraction, left, metrics, now)))
    jsonschema.validate(status["trainerStatus"], STATUS)
    assert ("progressPercentage" in status["trainerStatus"]) == (fraction is not None)


def test_the_custom_resource_does_not_take_everything() -> None:
    for broken in ({"progressPercentage": 101}, {"metrics": [{"name": "", "value": "1"}]}, {"more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, STATUS)


def test_how_much_is_done() -> None:
    assert fraction_done(1, 4, 0, 10) == 0.0 and fraction_done(4, 4, 10, 10) == 1.0
    assert fraction_done(3, None, 5, 10) is None and fraction_done(1, 0, 5, 10) is None
    # An epoch may turn out to be longer than the one before.
    assert fraction_done(2, 4, 15, 10) == 0.5
    # Only at the end of the fit all is done.
    assert status_of(0.999, None, {}, 0.0)["trainerStatus"]["progressPercentage"] == 99
    assert status_of(1.0, None, {}, 0.0)["trainerStatus"]["progressPercentage"] == 100
    assert steps_left(4, 4, 10, 10) == steps_left(5, 4, 3, 10) == 0


def test_the_log_is_that_of_tfdist(caplog: pytest.LogCaptureFixture) -> None:
    assert trainjob_status._log is logging.getLogger("tfdist")
