"""`tfdist run -n W --ps P`: a chief drives, workers and parameter servers serve it, a lost worker is replaced alone."""

from __future__ import annotations

import json
import os
import signal
import time
from inspect import cleandoc

import pytest
from click.testing import CliRunner

from tests.launcher.conftest import Launch, wait_until
from tests.launcher.test_stages import SERVE
from tests.launcher.training import events, of_kind, program
from tfdist.launch.command import main

# The stand-in of tests/launcher/test_stages.py, but that workers tell what they are before they serve.
ROLES = """
    replacement = os.environ["TFDIST_REPLACEMENT"]
    def note(life=name):
        facts = {"pid": os.getpid(), "config": os.environ["TF_CONFIG"], "replacement": replacement}
        Path(f"{life}-{replacement or 0}.tmp").write_text(json.dumps(facts))
        Path(f"{life}-{replacement or 0}.tmp").rename(f"{life}-{replacement or 0}")
        print("up", replacement or 0, flush=True)
    def await_file(*names):
        while not all(Path(n).exists() for n in names): time.sleep(0.01)
    def drive(until, steps=1):
        writer.begin()
        writer.report("training", steps)
        Path("trained").touch()
        while not Path(until).exists():
            writer.report("training", steps)
            time.sleep(0.01)
"""


def ps_program(text: str) -> str:
    """A program in which `serve()` is for all but the chief to call, and `drive(file)` trains until there is a file."""
    serving = cleandoc(SERVE).replace("if index:", 'if job != "chief":')
    return program(f"{serving}\n{cleandoc(ROLES)}\n{cleandoc(text)}")


SERVING = "if job != 'chief': note(); serve()\n"


def facts(started: Launch, name: str) -> dict:
    started.wait_for_file(name)
    return json.loads((started.folder / name).read_text())


def kill(started: Launch, name: str, number: int = signal.SIGKILL) -> dict:
    """Kills a process that has told what it is, and returns that."""
    found = facts(started, name)
    os.kill(found["pid"], number)
    return found


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


@pytest.mark.parametrize("code", [0, 3, 77])
def test_the_exit_code_is_the_chiefs_and_nothing_is_left(launch, code: int) -> None:
    script = SERVING + f"await_file('worker-0-0', 'worker-1-0', 'ps-0-0')\ntrain(3)\nsys.exit({code})"
    started = launch(ps_program(script), "--ps", "1", "--max-restarts", "0", "--no-warm")
    result = started.finish()
    assert result.code == code
    assert (
        "tfdist: 1 chief, 2 workers and 1 ps on this machine; output of the other 3 goes to tfdist-logs/" in result.err
    )
    assert ("chief 0 failed with exit code 3" in result.err) == (code == 3)
    assert "worker" not in result.err.partition("\n")[2]
    assert started.log("worker-1") == started.log("ps-0") == "up 0\n"
    started.assert_nothing_is_left()


def test_servers_that_outlast_the_chief_are_ended(launch) -> None:
    script = "if job != 'chief': note(); wait()\nawait_file('worker-0-0', 'worker-1-0', 'ps-0-0')"
    started = launch(ps_program(script), "--ps", "1", "--no-warm")
    begin = time.monotonic()
    assert started.finish().code == 0
    assert time.monotonic() - begin < 8
    started.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_worker_is_replaced_alone(launch, number: int) -> None:
    script = SERVING + "drive(until='end')\nprint('complete', flush=True)"
    started = launch(ps_program(script), "--ps", "1", "--no-warm")
    started.wait_for_file("trained", "worker-0-0", "ps-0-0")
    before = kill(started, "worker-1-0", number)
    after = facts(started, "worker-1-1")
    assert after == {"pid": after["pid"], "config": before["config"], "replacement": "1"}
    assert after["pid"] != before["pid"]
    (started.folder / "end").touch()
    result = started.finish()
    assert result.code == 0, result.err
    assert result.out == "[chief 0] complete\n"
    log = next((started.folder / "tfdist-logs").iterdir()) / "worker-1.log"
    name = signal.Signals(number).name
    assert result.err.splitlines()[1:] == [
        f"tfdist: worker 1 was killed by {name} ({log.relative_to(started.folder)}); started again "
        "(replacement 1 of 3), the others go on"
    ]
    assert started.log("worker-1") == "up 0\n--- replacement 1 ---\nup 1\n"
    assert started.log("worker-0") == started.log("ps-0") == "up 0\n"
    assert [event["event"] for event in events(started.folder)] == ["start", "replacement", "complete"]
    (event,) = of_kind(started.folder, "replacement")
    assert {key: event[key] for key in ("task", "kind", "exit_code", "number", "delay")} == {
        "task": "worker 1",
        "kind": "signal",
        "exit_code": 128 + number,
        "number": 1,
        "delay": 0.0,
    }
    started.assert_nothing_is_left()


def test_a_worker_that_fails_is_replaced_and_its_helpers_do_not_hold_its_place(launch) -> None:
    script = """
        if name == "worker-1" and not replacement:
            subprocess.Popen(["sleep", "60"])
            await_file("trained")
            note()
            sys.exit(5)
        if job != "chief": note(); serve()
        await_file("worker-0-0", "ps-0-0")
        drive(until="worker-1-1")
    """
    started = launch(ps_program(script), "--ps", "1", "--no-warm")
    result = started.finish()
    assert result.code == 0, result.err
    assert "worker 1 failed with exit code 5 (tfdist-logs/" in result.err
    started.assert_nothing_is_left()


def test_the_training_goes_on_without_workers_when_the_limit_is_reached(launch) -> None:
    started = launch(ps_program(SERVING + "drive(until='end')"), "--ps", "1", "--max-restarts", "1", "--no-warm")
    started.wait_for_file("trained", "worker-0-0", "ps-0-0")
    kill(started, "worker-1-0")
    kill(started, "worker-1-1")
    wait_until(lambda: len(of_kind(started.folder, "loss")) == 1, 5, "the event")
    time.sleep(0.3)
    (started.folder / "end").touch()
    result = started.finish()
    assert result.code == 0, result.err
    first, second = result.err.splitlines()[1:]
    assert first.endswith("; started again (replacement 1 of 1), the others go on")
    assert first.startswith("tfdist: worker 1 was killed by SIGKILL (")
    assert second.endswith(
        "; not started again: 1 restart used up (--max-restarts); the training goes on with 1 worker"
    )
    assert of_kind(started.folder, "loss")[0]["workers"] == 1
    assert [event["event"] for event in events(started.folder)] == ["start", "replacement", "loss", "complete"]
    started.assert_nothing_is_left()


@pytest.mark.parametrize(("limit", "killed"), [(0, 0), (1, 1)])
def test_without_any_worker_the_run_fails(launch, limit: int, killed: int) -> None:
    options = ("-n", "1", "--ps", "1", "--max-restarts", str(limit), "--no-warm")
    started = launch(ps_program(SERVING + "drive(until='end')"), *options)
    started.wait_for_file("trained", "ps-0-0")
    for life in range(killed + 1):
        kill(started, f"worker-0-{life}")
    result = started.finish()
    assert result.code == 137
    assert "tfdist: worker 0 was killed by SIGKILL (exit code 137; the kernel does that" in result.err
    assert ("not restarted: 1 restart used up (--max-restarts)" in result.err) == (limit == 1)
    started.assert_nothing_is_left()


def test_a_worker_that_dies_at_once_is_not_started_in_a_tight_loop(launch) -> None:
    script = """
        if name == "worker-1":
            note()
            if not replacement: await_file("trained")
            kill()
        if job != "chief": note(); serve()
        await_file("worker-0-0", "worker-1-0", "ps-0-0")
        drive(until="end")
    """
    started = launch(ps_program(script), "--ps", "1", "--max-restarts", "2", "--no-warm")
    started.wait_for_file("worker-1-2")
    wait_until(lambda: len(of_kind(started.folder, "loss")) == 1, 15, "the loss")
    (started.folder / "end").touch()
    result = started.finish()
    assert result.code == 0, result.err
    assert "started again (replacement 1 of 2)" in result.err
    assert "started again in 1 s (replacement 2 of 2)" in result.err
    first, second = of_kind(started.folder, "replacement")
    assert (first["delay"], second["delay"]) == (0.0, 1.0)
    assert of_kind(started.folder, "loss")[0]["time"] - second["time"] > 1.0
    started.assert_nothing_is_left()


def test_a_chief_without_workers_does_not_hang_while_one_is_started(launch) -> None:
    script = """
        if name == "worker-0":
            note()
            if not replacement: await_file("trained")
            if replacement != "3": kill()
        if job != "chief": note(); serve()
        await_file("worker-0-0", "ps-0-0")
        writer.begin()
        writer.report("training", 1)
        Path("trained").touch()
        await_file("worker-0-3")
    """
    options = ("-n", "1", "--ps", "1", "--hang-timeout", "2.5", "--no-warm")
    started = launch(ps_program(script), *options)
    result = started.finish()
    assert result.code == 0, result.err
    assert [event["delay"] for event in of_kind(started.folder, "replacement")] == [0.0, 1.0, 2.0]
    started.assert_nothing_is_left()


def test_without_restarts_the_training_goes_on_with_fewer_workers(launch) -> None:
    started = launch(ps_program(SERVING + "drive(until='end')"), "--ps", "1", "--max-restarts", "0")
    started.wait_for_file("trained", "worker-0-0", "ps-0-0")
    kill(started, "worker-1-0")
    wait_until(lambda: len(of_kind(started.folder, "loss")) == 1, 5, "the event")
    (started.folder / "end").touch()
    result = started.finish()
    assert result.code == 0, result.err
    assert "; not started again: --max-restarts is 0; the training goes on with 1 worker\n" in result.err
    started.assert_nothing_is_left()


def test_a_chief_that_ends_does_not_wait_for_a_replacement(launch) -> None:
    script = """
        if name == "worker-1":
            note()
            if not replacement: await_file("trained")
            Path("dead").touch(); kill()
        if job != "chief": note(); serve()
        await_file("worker-0-0", "worker-1-0", "ps-0-0")
        drive(until="worker-1-1")
        time.sleep(0.3)
    """
    started = launch(ps_program(script), "--ps", "1", "--max-restarts", "9", "--no-warm")
    assert started.finish().code == 0
    assert [event["number"] for event in of_kind(started.folder, "replacement")] == [1, 2]
    assert not (started.folder / "worker-1-2").exists()
    started.assert_nothing_is_left()


@pytest.mark.parametrize("victim", ["ps-0", "chief-0"])
def test_a_killed_parameter_server_or_chief_restarts_all(launch, victim: str) -> None:
    script = """
        if restart == 0: note()
        if job != "chief": serve()
        if restart == 0:
            await_file("worker-0-0", "worker-1-0", "ps-0-0")
            drive(until="never")
        writer.begin()
        writer.resumed(1)
        writer.report("training", 2)
        time.sleep(0.2)
    """
    started = launch(ps_program(script), "--ps", "1", "--max-restarts", "1", "--no-warm")
    started.wait_for_file("trained")
    time.sleep(0.2)
    kill(started, f"{victim}-0")
    result = started.finish()
    assert result.code == 0, result.err
    who = victim.replace("-", " ")
    assert f"tfdist: {who} was killed by SIGKILL at step 1; restart 1 of 1: training again after" in result.err
    starts = of_kind(started.folder, "start")
    assert [(start["workers"], len(start["processes"])) for start in starts] == [(2, 4), (2, 4)]
    assert not set(starts[0]["processes"].values()) & set(starts[1]["processes"].values())
    assert of_kind(started.folder, "replacement") == []
    started.assert_nothing_is_left()


def test_a_worker_that_dies_before_the_chief_has_trained_fails_the_run(launch) -> None:
    script = "note()\nif name == 'worker-1': kill()\nif job != 'chief': serve()\nwriter.begin()\nwait()"
    started = launch(ps_program(script), "--ps", "1", "--no-warm")
    result = started.finish()
    assert result.code == 137
    assert "worker 1 was killed by SIGKILL" in result.err
    assert of_kind(started.folder, "replacement") == []
    started.assert_nothing_is_left()


def test_a_preempted_chief_is_served_until_it_has_saved(launch) -> None:
    script = """
        if job != "chief": note(); serve()
        def save(*_):
            time.sleep(0.5)
            sys.exit(77)
        signal.signal(signal.SIGTERM, save)
        await_file("worker-0-0", "worker-1-0", "ps-0-0")
        drive(until="never")
    """
    started = launch(ps_program(script), "--ps", "1", "--no-warm")
    started.wait_for_file("trained")
    wait_until(lambda: len(of_kind(started.folder, "start")) == 1, 5, "the event")
    started.popen.send_signal(signal.SIGTERM)
    assert started.finish().code == 77
    assert [event["event"] for event in events(started.folder)] == ["start", "preempted"]
    started.assert_nothing_is_left()


def test_a_stopped_parameter_server_is_named(launch) -> None:
    script = "if job == 'ps': os.kill(os.getpid(), signal.SIGSTOP)\nif job != 'chief': serve()\ntrain(3)\nwait()"
    options = ("--hang-timeout", "1", "--start-timeout", "1.5", "--max-restarts", "0", "--no-warm")
    started = launch(ps_program(script), "--ps", "1", *options)
    result = started.finish()
    assert result.code == 124
    assert "ps 0 is stopped (process state T): no progress for" in result.err
    started.assert_nothing_is_left()
