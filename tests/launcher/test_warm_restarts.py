"""Restarts under `tfdist run` for which a zygote has done the imports; the programs only claim to train."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.launcher.conftest import wait_until
from tests.launcher.training import of_kind, program

pytestmark = [pytest.mark.slow]

READY = 120.0
# The workers stand still until the zygote is there, and it gives way to everybody.
PATIENT = ("--hang-timeout", "600")
# Something that starts quickly is not worth a zygote.
SCRIPT = """
    if restart == 0:
        time.sleep(2.5)
        train(10)
        Path(f"trains-{name}").touch()
        while not Path("fail").exists(): time.sleep(0.02)
        if index == 1: kill()
        wait()
    train(20, resumed=10)
    forked = "zygote_program" in Path("/proc/self/cmdline").read_text()
    print("forked" if forked else "fresh", job, index, restart, len(os.sched_getaffinity(0)), sys.argv[1:])
    if index == 1: print("error text", file=sys.stderr)
    Path(f"again-{name}").touch()
    END
"""


def zygotes(started) -> list[int]:
    """The zygotes of a launch, without the workers forked from them."""
    found = []
    for pid in started.marked():
        try:
            command, status = (Path(f"/proc/{pid}/{name}").read_text() for name in ("cmdline", "stat"))
        except OSError:
            continue
        parent = int(status.rpartition(")")[2].split()[1])
        if "zygote_program" in command and parent == started.popen.pid and pid not in workers(started):
            found.append(pid)
    return found


def workers(started) -> set[int]:
    """The processes that the events of a launch name."""
    return {pid for event in of_kind(started.folder, "start") for pid in event["processes"].values()}


def wait_for_zygote(started) -> int:
    """Waits until there is a zygote that waits for work, that is, for ever at the same place."""
    wait_until(lambda: len(zygotes(started)) == 1, READY, "a zygote")
    (pid,) = zygotes(started)
    places = []

    def rests() -> bool:
        # In all threads: the imports have one of their own.
        places.append("".join(path.read_text() for path in sorted(Path(f"/proc/{pid}/task").glob("*/syscall"))))
        time.sleep(0.1)
        return len(places) > 10 and len(set(places[-10:])) == 1 and "running" not in places[-1]

    wait_until(rests, READY, "the zygote's imports")
    return pid


def script(end: str = "pass") -> str:
    return program(SCRIPT.replace("END", end))


@pytest.mark.exhaustive
def test_restarted_workers_are_forked(launch, tmp_path) -> None:
    end = "sys.exit(5 if index == 0 else 0)"
    started = launch(script(end), *PATIENT, "-n", "2", "--max-restarts", "1", arguments=["--epochs", "3"])
    wait_for_zygote(started)
    (tmp_path / "fail").touch()
    result = started.finish(60)
    assert result.code == 5, result.err
    cores = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert f"[worker 0] forked worker 0 1 {cores} ['--epochs', '3']" in result.out.splitlines()
    assert started.log("worker-1").splitlines() == [
        "--- restart 1 ---",
        f"forked worker 1 1 {cores} ['--epochs', '3']",
        "error text",
    ]
    assert (
        "worker 1 was killed by SIGKILL at step 10; restart 1 of 1\ntfdist: restart 1 of 1: training again after"
        in result.err
    )
    assert "worker 0 failed with exit code 5" in result.err
    started.assert_nothing_is_left()


@pytest.mark.exhaustive
def test_fewer_workers_are_forked_too(launch, tmp_path) -> None:
    started = launch(script(), *PATIENT, "-n", "1:2")
    wait_for_zygote(started)
    (tmp_path / "fail").touch()
    result = started.finish(60)
    assert result.code == 0, result.err
    assert "restart 1 of 3 with 1 worker: training again after" in result.err
    assert f"[worker 0] forked worker 0 1 {len(os.sched_getaffinity(0))} []" in result.out.splitlines()


@pytest.mark.exhaustive
def test_restart_without_the_zygote_that_was_killed(launch, tmp_path) -> None:
    started = launch(script(), *PATIENT, "-n", "2")
    os.kill(wait_for_zygote(started), signal.SIGKILL)
    (tmp_path / "fail").touch()
    result = started.finish(60)
    assert result.code == 0, result.err
    assert "[worker 0] fresh worker 0 1" in result.out
    started.assert_nothing_is_left()


@pytest.mark.exhaustive
def test_nothing_outlives_the_launcher_after_a_warm_restart(launch, tmp_path) -> None:
    started = launch(script("wait()"), "-n", "2")
    wait_for_zygote(started)
    (tmp_path / "fail").touch()
    started.wait_for_file("again-worker-0", "again-worker-1")
    assert "forked worker 1" in started.log("worker-1")
    started.popen.kill()
    started.assert_nothing_is_left()


@pytest.mark.exhaustive
def test_signal_after_a_warm_restart(launch, tmp_path) -> None:
    end = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); Path(f'waits-{name}').touch(); wait()"
    started = launch(script(end), *PATIENT, "-n", "2")
    wait_for_zygote(started)
    (tmp_path / "fail").touch()
    started.wait_for_file("waits-worker-0", "waits-worker-1")
    started.popen.send_signal(signal.SIGTERM)
    assert started.finish(20).code == 4
    started.assert_nothing_is_left()


@pytest.mark.parametrize("options", [("--no-warm",), ("--max-restarts", "0")])
@pytest.mark.exhaustive
def test_no_zygote_without_need(launch, tmp_path, options: tuple[str, ...]) -> None:
    started = launch(script(), *PATIENT, "-n", "2", *options)
    started.wait_for_file("trains-worker-0", "trains-worker-1")
    time.sleep(1.0)
    assert zygotes(started) == []
    assert len(started.marked()) == 4  # launcher, guardian and workers


@pytest.mark.exhaustive
def test_a_worker_of_parameter_servers_is_replaced_by_a_forked_one(launch, tmp_path) -> None:
    end = """
        text = Path("/proc/self/cmdline").read_text()
        print("forked" if "zygote_program" in text else "fresh", name, os.environ["TFDIST_REPLACEMENT"], flush=True)
        if job == "chief":
            time.sleep(2.5)
            writer.begin()
            while not Path("end").exists():
                writer.report("training", 1)
                time.sleep(0.01)
            sys.exit(0)
        if name == "worker-1" and not os.environ["TFDIST_REPLACEMENT"]:
            while not Path("fail").exists(): time.sleep(0.02)
            kill()
        Path(f"serves-{name}").touch()
        while not Path("end").exists(): time.sleep(0.02)
    """
    started = launch(program(end), "--ps", "1")
    wait_for_zygote(started)
    (tmp_path / "fail").touch()
    started.wait_for_file("serves-worker-1")
    (tmp_path / "end").touch()
    result = started.finish(60)
    assert result.code == 0, result.err
    assert started.log("worker-1").splitlines() == ["fresh worker-1 ", "--- replacement 1 ---", "forked worker-1 1"]
    assert "started again (replacement 1 of 3), the others go on" in result.err
    started.assert_nothing_is_left()
