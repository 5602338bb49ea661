"""`tfdist run --stages K --replicas R`: one process drives and trains, the others serve it."""

from __future__ import annotations

import json
from inspect import cleandoc

import pytest
from click.testing import CliRunner

from tests.launcher.training import program
from tfdist.launcher.arguments import Stages, stages_of
from tfdist.launcher.command import main
from tfdist.launcher.plan import Machine, PlanError, RunOptions, plan_run
from tfdist.launcher.supervisor import announcement

# What tfdist.runtime.servers does, without TensorFlow: a lock is free when its owner's process is gone.
SERVE = """
    import fcntl, threading
    life = Path("life-" + os.environ["TFDIST_RESTART"])
    if index:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        Path(f"serving-{index}").touch()
    else:
        held = open(life, "w")
        fcntl.flock(held, fcntl.LOCK_EX)
        life.with_suffix(".held").touch()
    def serve():
        while not life.with_suffix(".held").exists(): time.sleep(0.01)
        fcntl.flock(open(life), fcntl.LOCK_EX)
        sys.exit(0)
"""


def stages(text: str) -> str:
    """A program whose first process does what the text says, with `serve()` for the others to call."""
    return program(f"{cleandoc(SERVE)}\n{cleandoc(text)}")


def drive(text: str) -> str:
    return stages(f"if index: serve()\n{cleandoc(text)}")


def invoke(*arguments: str):
    return CliRunner().invoke(main, ["run", *arguments])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["-n", "2", "--stages", "3", "t.py"],
            "-n 2 and --stages 3: expected only one of them. "
            "--stages starts a process for each stage and replica, here 3: leave -n out.",
        ),
        (["-n", "1:2", "--stages", "2", "--replicas", "2", "t.py"], "-n 1:2 and --stages 2: expected only one"),
        (["--replicas", "2", "t.py"], "--replicas 2: expected --stages K as well. Use -n 2 for copies of a whole"),
        (["--stages", "2", "--ps", "1", "t.py"], "--ps 1 and --stages 2: expected only one of them."),
        (["--stages", "2", "--chief", "t.py"], "--chief and --stages 2: expected only one of them."),
        (["--stages", "0", "t.py"], "0 is not in the range x>=1"),
        (["--stages", "2", "--replicas", "0", "t.py"], "0 is not in the range x>=1"),
        (
            ["--stages", "2", "--env", "TFDIST_STAGES=3", "t.py"],
            "--env TFDIST_STAGES=...: tfdist run sets TFDIST_STAGES for every process itself. "
            "Use --stages and --replicas.",
        ),
    ],
)
def test_usage_errors(arguments: list[str], text: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert text in " ".join(result.output.split())


def test_what_the_options_ask_for() -> None:
    assert stages_of(None, None, None, ps=0, chief=False) is None
    assert stages_of(None, 3, 2, ps=0, chief=False) == Stages(3, 2)
    with pytest.raises(ValueError, match=r"-n 4 and --stages 2: .* here 4: leave -n out\."):
        stages_of((4, 4), 2, 2, ps=0, chief=False)


def test_announcement() -> None:
    assert announcement(RunOptions(3, stages=Stages(3)), "logs", show_all=False) == (
        "3 workers (3 stages) on this machine; output of the other 2 goes to logs/"
    )
    assert announcement(RunOptions(2, stages=Stages(1, 2)), "logs", show_all=True) == (
        "2 workers (2 replicas of 1 stage) on this machine; complete logs in logs/"
    )


def test_plan() -> None:
    options = RunOptions(2, stages=Stages(2))
    inherited = {"TFDIST_STAGES": "7", "TFDIST_REPLICAS": "7"}
    jobs = {"worker": ["a:2001", "a:2002"]}
    plans = plan_run(options, ["t"], Machine((0, 1)), jobs, inherited, "r", "/logs")
    assert [(plan.name, plan.serves, plan.shown) for plan in plans] == [
        ("worker 0", False, True),
        ("worker 1", True, False),
    ]
    assert [(plan.env["TFDIST_STAGES"], plan.env["TFDIST_REPLICAS"]) for plan in plans] == [("2", "1")] * 2
    plans = plan_run(RunOptions(2), ["t"], Machine((0, 1)), jobs, inherited, "r", "/logs")
    assert not any(plan.serves or "TFDIST_STAGES" in plan.env or "TFDIST_REPLICAS" in plan.env for plan in plans)
    with pytest.raises(PlanError, match="--env TFDIST_REPLICAS"):
        RunOptions(env={"TFDIST_REPLICAS": "2"})


def test_every_process_learns_the_stages_and_replicas(launch) -> None:
    script = """
        names = ("TFDIST_STAGES", "TFDIST_REPLICAS")
        Path(f"{name}.tmp").write_text(json.dumps([os.environ[n] for n in names] + [len(config["cluster"]["worker"])]))
        Path(f"{name}.tmp").rename(name)
        # The training shall not end before the others have written theirs.
        while len(list(Path().glob("worker-?"))) < 4: time.sleep(0.01)
    """
    started = launch(script, "--stages", "2", "--replicas", "2")
    result = started.finish()
    assert result.code == 0
    assert "tfdist: 4 workers (2 replicas of 2 stages) on this machine; output of the other 3 goes to" in result.err
    told = [json.loads((started.folder / f"worker-{index}").read_text()) for index in range(4)]
    assert told == [["2", "2", 4]] * 4
    started.assert_nothing_is_left()
