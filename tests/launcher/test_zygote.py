"""The zygote from the launcher's side: what it can stand for, and what happens when it or the launcher ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launcher.conftest import Launch, wait_until
from tests.launcher.forked_workers import COMMAND, READY, Workers, start_zygote, wait
from tfdist.launcher.warm.zygote import Zygote, ZygoteError, can_fork

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forking from a zygote needs Linux"),
]

_PR_GET_CHILD_SUBREAPER = 37


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(tmp_path_factory.mktemp("zygote")) as made:
        yield made


@pytest.mark.exhaustive
def test_launcher_adopts_nobody_afterwards(workers: Workers) -> None:
    assert workers.run("print(1)") == (0, "1\n")
    answer = ctypes.c_int(-1)
    assert ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer), 0, 0, 0) == 0
    assert answer.value == 0


def policies(pid: int) -> set[int]:
    """The scheduling policies of the threads of a process."""
    return {os.sched_getscheduler(thread.id) for thread in psutil.Process(pid).threads()}


def test_importing_zygote_defers_until_told_otherwise(tmp_path: Path, workers: Workers) -> None:
    zygote = Zygote(COMMAND, workers.env)
    try:
        wait_until(lambda: os.SCHED_IDLE in policies(zygote.group), 20, "an idle thread")
        # The thread from which workers are forked: an ordinary user's could not come back from an idle policy.
        assert os.sched_getscheduler(zygote.group) == os.sched_getscheduler(0)
        zygote.hurry()
        if may_hurry():
            assert policies(zygote.group) == {os.sched_getscheduler(0)}
        assert zygote.is_importing()
    finally:
        zygote.close()


def may_hurry() -> bool:
    """Whether this user may raise priorities."""
    code = "import os; os.nice(1); os.nice(-1)"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


@pytest.mark.exhaustive
def test_dead_zygote_is_reported_and_its_workers_live_on(tmp_path: Path, workers: Workers) -> None:
    zygote = start_zygote(tmp_path, workers.env)
    (tmp_path / "script.py").write_text("import time; time.sleep(3); print('done')")
    with open(tmp_path / "output", "wb") as output:
        worker = zygote.spawn(workers.env, [], output.fileno())
        os.killpg(zygote.group, signal.SIGKILL)
        with pytest.raises(ZygoteError, match="the zygote"):
            zygote.spawn(workers.env, [], output.fileno())
    zygote.close()
    assert wait(worker) == 0
    assert (tmp_path / "output").read_text() == "done\n"


@pytest.mark.exhaustive
def test_stopped_zygote_costs_no_more_than_the_deadline(
    tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfdist.launcher.warm.zygote._SPAWN_DEADLINE", 0.5)
    zygote = start_zygote(tmp_path, workers.env)
    (tmp_path / "script.py").write_text("open('ran', 'w')")
    os.killpg(zygote.group, signal.SIGSTOP)
    with open(tmp_path / "output", "wb") as output, pytest.raises(ZygoteError, match="timed out"):
        zygote.spawn(workers.env, [], output.fileno())
    os.killpg(zygote.group, signal.SIGCONT)
    time.sleep(1.0)
    zygote.close()
    # The abandoned worker has not run: somebody else was started in its place.
    assert not (tmp_path / "ran").exists()


def test_nothing_outlives_a_killed_launcher(tmp_path: Path) -> None:
    driver = f"""
        import os, sys, time
        from tfdist.launcher.warm.zygote import Zygote
        zygote = Zygote({COMMAND!r}, os.environ)
        while not zygote.is_ready():
            time.sleep(0.05)
        worker = zygote.spawn(os.environ, (), 1)
        print(worker.pid, flush=True)
        worker.wait()
    """
    (tmp_path / "script.py").write_text("open('began', 'w'); import time; time.sleep(100)")
    driver_path = tmp_path / "driver.py"
    driver_path.write_text(textwrap.dedent(driver))
    launch = Launch(tmp_path, [sys.executable, str(driver_path)])
    try:
        launch.wait_for_file("began", deadline=READY)
        assert len(launch.marked()) == 3
        launch.popen.kill()
        launch.assert_nothing_is_left()
    finally:
        launch.clean_up()


def test_what_fits(workers: Workers) -> None:
    assert workers.zygote.fits(COMMAND, {**workers.env, "TF_CONFIG": "{}", "OMP_NUM_THREADS": "7"})
    assert not workers.zygote.fits(COMMAND, {**workers.env, "TF_ENABLE_ONEDNN_OPTS": "0"})
    assert not workers.zygote.fits((*COMMAND, "--more"), workers.env)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ((sys.executable, "-u", "train.py"), True),
        ((sys.executable, "-u", "-m", "package.train"), True),
        ((sys.executable, "-u", "-c", "pass"), False),
        ((sys.executable, "-u", "archive.pyz"), False),
        ((sys.executable, "train.py"), False),
        (("/usr/bin/other-python", "-u", "train.py"), False),
        (("sh", "train.sh"), False),
    ],
)
def test_can_fork(command: tuple[str, ...], expected: bool) -> None:
    assert can_fork(command) is expected
