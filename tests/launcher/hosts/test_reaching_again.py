"""What a restart does about hosts that do not come back as they were; the agents are real, ssh is pretended."""

from __future__ import annotations

import functools
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launcher.hosts.test_connections import DEADLINE
from tfdist.launcher.hosts import run as module
from tfdist.launcher.hosts.connection import HostsError, Reach, Reached
from tfdist.launcher.hosts.places import ListedHost, plan_hosts
from tfdist.launcher.hosts.run import HostsRun
from tfdist.launcher.operating_system import SignalInbox
from tfdist.launcher.output import Terminal
from tfdist.launcher.plan import RunOptions
from tfdist.launcher.policy import Restart, RestartPolicy
from tfdist.launcher.supervisor import Patience

pytestmark = pytest.mark.timeout(120)

# Each host has the GPUs that a file of its name tells.
_SSH = """\
#!/bin/sh
while [ $# -gt 2 ]; do shift; done
export CUDA_VISIBLE_DEVICES="$(cat "$(dirname "$0")/gpus-$1")"
exec /bin/sh -c "$2"
"""


class Setting:
    """A run on `one`, which has two GPUs, and `two`, which has one, before a restart."""

    def __init__(self, folder: Path, fewest: int) -> None:
        self.said: list[str] = []
        self._folder = folder
        (folder / "ssh").write_text(_SSH)
        (folder / "ssh").chmod(0o755)
        self.set_gpus("one", "0,1")
        self.set_gpus("two", "0")
        reach = Reach((str(folder / "ssh"),), None, str(folder), "run", str(folder / "logs"), {})
        listed = [ListedHost("one"), ListedHost("two")]
        of_run = {"command": ("true",), "environ": {}, "run_id": "run", "log_dir": str(folder / "logs")}
        self._asked = (RunOptions(workers=3), fewest, listed, reach, functools.partial(plan_hosts, **of_run))
        self._terminal = Terminal(io.BytesIO(), is_tty=False)
        self._terminal.message = self.said.append  # type: ignore[method-assign]

    def set_gpus(self, host: str, gpus: str) -> None:
        (self._folder / f"gpus-{host}").write_text(gpus)

    def run(self) -> HostsRun:
        """As it was before the restart."""
        _, _, listed, reach, _ = self._asked
        with Reached.reach(listed, reach) as first:
            of_run = (RestartPolicy(3), self._folder / "logs", self._terminal, Patience(start_timeout=DEADLINE))
            return HostsRun(*self._asked, first, *of_run)


class Meanwhile(SignalInbox):
    """Does something again and again while hosts are waited for."""

    def __init__(self, do: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._do = do

    def check(self) -> None:
        self._do()


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Setting]:
    monkeypatch.setattr(module, "_FIRST_PAUSE", 0.1)
    return lambda fewest: Setting(tmp_path, fewest)


@pytest.mark.parametrize("fewest", [3, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_host_that_is_lost_while_it_gets_ready_is_tried_again(setting, monkeypatch, fewest: int) -> None:
    prepare, tried = Reached.prepare, []

    def lose_once(self: Reached, *more) -> dict[str, list[str]]:
        tried.append(self)
        if len(tried) == 1:
            os.kill(self.connections["two"].pid, signal.SIGKILL)
        return prepare(self, *more)

    monkeypatch.setattr(Reached, "prepare", lose_once)
    of_run = setting(fewest)
    reached, plans = of_run.run()._reach_again(Restart(1, 3, 0.0), Meanwhile())
    with reached:
        assert [plan.host for plan in plans] == ["one", "one", "two"]
    lost = "host two is lost: its agent has ended with exit code -9"
    assert of_run.said == [f"{lost}; trying again for {DEADLINE:g} s"]
    assert len(tried) == 2


@pytest.mark.nightly
def test_hosts_that_cannot_be_used_are_not_tried_again(setting, monkeypatch) -> None:
    def refuse(self: Reached, *more) -> None:
        raise HostsError("host two: no free ports")

    monkeypatch.setattr(Reached, "prepare", refuse)
    with pytest.raises(HostsError, match=r"^host two: no free ports$"):
        setting(1).run()._reach_again(Restart(1, 3, 0.0), Meanwhile())


def test_fewer_places_than_asked_for_are_waited_for(setting) -> None:
    """A GPU that has failed, say: who has asked for three workers does not want two."""
    of_run = setting(3)
    run = of_run.run()
    of_run.set_gpus("one", "0")
    inbox = Meanwhile(lambda: of_run.set_gpus("one", "0,1") if of_run.said else None)
    reached, plans = run._reach_again(Restart(1, 3, 0.0), inbox)
    with reached:
        assert [plan.host for plan in plans] == ["one", "one", "two"]
    assert of_run.said == [f"host one has 1 place now, and had 2; trying again for {DEADLINE:g} s"]


@pytest.mark.nightly
def test_fewer_places_are_said_where_they_are_enough(setting) -> None:
    of_run = setting(2)
    run = of_run.run()
    of_run.set_gpus("one", "0")
    reached, plans = run._reach_again(Restart(1, 3, 0.0), Meanwhile())
    with reached:
        assert [plan.host for plan in plans] == ["one", "two"]
    assert of_run.said == ["host one has 1 place now, and had 2; going on with 2 of 3 workers"]
