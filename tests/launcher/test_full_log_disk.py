"""A full disk costs the logs, never the training."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import small_disks
from tests.launcher.conftest import Launch, wait_until
from tests.launcher.tuning.test_run import KEEPER, run_of
from tfdist.jobs.local import LocalEngine
from tfdist.jobs.record import Records
from tfdist.jobs.request import Request
from tfdist.jobs.status import RUNNING, SUCCEEDED
from tfdist.launcher.arguments import Target

pytestmark = pytest.mark.mount

# More than there is room for.
CHATTY = """
    for number in range(200):
        print("x" * 9999)
    Path(f"done-{name}").touch()
"""


@pytest.fixture
def logs(tmp_path: Path) -> Iterator[Path]:
    """A folder on a small disk."""
    with small_disks.small_disk(tmp_path / "logs", "400k"):
        yield tmp_path / "logs"


def test_run(launch, tmp_path: Path, logs: Path) -> None:
    with open(logs / "shown", "wb") as shown:
        result = launch(CHATTY, "--log-dir", "logs", stdout=shown).finish()
    assert result.code == 0, result.err
    assert sorted(path.name for path in tmp_path.glob("done-*")) == ["done-worker-0", "done-worker-1"]
    assert "tfdist: the logs in logs/ are not complete any more: No space left on device\n" in result.err
    assert re.search(r"tfdist: \d{6,} bytes are missing in the logs in logs/: No space left on device\n", result.err)
    assert re.search(r"tfdist: \d{6,} bytes of the output were not shown: No space left on device\n", result.err)


def test_restarts_go_on(launch, logs: Path) -> None:
    script = """
        from tfdist.supervision.progress import ProgressWriter
        writer = ProgressWriter.from_environment()
        writer.begin()
        for step in range(1, 9):
            writer.report("training", step)
        if index == 1 and os.environ["TFDIST_RESTART"] == "0":
            Path("logs/worker-1.log").unlink()
            try:
                for number in range(10000):
                    Path(f"logs/{number}").write_bytes(b"x" * 1000)
            except OSError:
                sys.exit(3)
        print("again " * 1000)
    """
    result = launch(script, "--log-dir", "logs").finish()
    assert result.code == 0, result.err
    assert "restart 1 of 3" in result.err and "not complete any more: No space left on device" in result.err


LAUNCH = """
import tfdist
def train():
    for number in range(200):
        print("x" * 9999)
    return tfdist.discover().rank
print("returned", tfdist.launch(train, workers=2, log_dir="logs"))
"""


@pytest.mark.nightly
def test_launch(launches: list[Launch], tmp_path: Path, logs: Path) -> None:
    launches.append(started := Launch(tmp_path, [sys.executable, "-c", LAUNCH]))
    result = started.finish(60)
    assert (result.code, result.out.splitlines()[-1:]) == (0, ["returned 0"]), result.err
    assert f"the logs in {logs}/ are not complete any more: No space left on device" in result.err


@pytest.mark.nightly
def test_tune(logs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(
        logs,
        f'event("search"); meet(); print("x" * 1000000); {KEEPER.partition("meet(); ")[2]}',
        'wait("tfdist-search-1.json"); print("y" * 1000000); (folder / "done").touch(); time.sleep(1000)',
    )
    assert run.run() == 0
    assert "are not complete any more: No space left on device" in capsys.readouterr().err


@pytest.mark.nightly
def test_submit(tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chatty.py").write_text('name = "job"\nfrom pathlib import Path\n' + textwrap.dedent(CHATTY))
    engine = LocalEngine(Records(logs / "jobs"))
    record = engine.submit(Request("local", Target("script", ("chatty.py",)), workers=2))

    def ended() -> str:
        return engine.status(engine.records.load(record.id)).state

    wait_until(lambda: ended() != RUNNING, 60, "the end of the job")
    assert ended() == SUCCEEDED and (tmp_path / "done-job").exists()
    assert Path(record.output).stat().st_size < 400_000
