"""`tfdist run -n W --ps P`: a chief drives, workers and parameter servers serve it, a lost worker is replaced alone."""

from __future__ import annotations

import json
import os
import signal
from inspect import cleandoc

import pytest
from click.testing import CliRunner

from tests.launcher.conftest import Launch
from tests.launcher.test_stages import SERVE
from tests.launcher.training import events, of_kind, program
from tfdist.launcher.command import main

# The stand-in of tests/launcher/test_stages.py, but that workers tell what they are before they serve.
ROLES = """
    replacement = os.environ["TFDIST_REPLACEMENT"]
    def note():
        facts = {"pid": os.getpid(), "config": os.environ["TF_CONFIG"], "replacement": replacement}
        print("up", replacement or 0, flush=True)
        Path(f"{name}-{replacement or 0}.tmp").write_text(json.dumps(facts))
        Path(f"{name}-{replacement or 0}.tmp").rename(f"{name}-{replacement or 0}")
    def await_file(*names):
        while not all(Path(n).exists() for n in names): time.sleep(0.01)
    def drive(until):
        writer.begin()
        writer.report("training", 1)
        Path("trained").touch()
        await_file(until)
"""


def ps_program(text: str) -> str:
    """A program in which `serve()` is for all but the chief to call, and `drive(file)` trains until there is a file."""
    serving = cleandoc(SERVE).replace("if index:", 'if job != "chief":')
    return program(f"{serving}\n{cleandoc(ROLES)}\n{cleandoc(text)}")


def facts(started: Launch, name: str) -> dict:
    started.wait_for_file(name)
    return json.loads((started.folder / name).read_text())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ps", "1", "--chief", "t.py"], "--chief and --ps 1: expected only one of them."),
        (
            ["-n", "1:2", "--ps", "1", "t.py"],
            "-n 1:2 and --ps 1: expected one number of workers. With parameter servers a worker that is lost is "
            "replaced, and the others go on meanwhile: use -n 2.",
        ),
        (["--ps", "-1", "t.py"], "--ps -1: expected 0 or more."),
    ],
)
def test_usage_errors(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(main, ["run", *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_a_killed_worker_is_replaced_alone(launch) -> None:
    script = "if job != 'chief': note(); serve()\ndrive(until='end')\nprint('complete', flush=True)"
    started = launch(ps_program(script), "--ps", "1")
    started.wait_for_file("trained", "worker-0-0", "ps-0-0")
    before = facts(started, "worker-1-0")
    os.kill(before["pid"], signal.SIGKILL)
    after = facts(started, "worker-1-1")
    assert after == {"pid": after["pid"], "config": before["config"], "replacement": "1"}
    assert after["pid"] != before["pid"]
    (started.folder / "end").touch()
    result = started.finish()
    assert result.code == 0, result.err
    assert result.out == "[chief 0] complete\n"
    log = next((started.folder / "tfdist-logs").iterdir()) / "worker-1.log"
    assert result.err.splitlines()[1:] == [
        f"tfdist: worker 1 was killed by SIGKILL ({log.relative_to(started.folder)}); started again "
        "(replacement 1 of 3), the others go on"
    ]
    assert started.log("worker-1") == "up 0\n--- replacement 1 ---\nup 1\n"
    assert started.log("worker-0") == started.log("ps-0") == "up 0\n"
    assert [event["event"] for event in events(started.folder)] == ["start", "replacement", "complete"]
    (event,) = of_kind(started.folder, "replacement")
    assert {key: event[key] for key in ("task", "kind", "exit_code", "number", "delay")} == {
        "task": "worker 1",
        "kind": "signal",
        "exit_code": 137,
        "number": 1,
        "delay": 0.0,
    }
    started.assert_nothing_is_left()
