"""What the launcher's tests have their children do in place of a training."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

_HELPERS = """
    from tfdist.supervision.progress import ProgressWriter
    restart = int(os.environ["TFDIST_RESTART"])
    writer = ProgressWriter.from_environment()
    def train(stop, resumed=None, pause=0.01):
        writer.begin()
        if resumed is not None: writer.resumed(resumed)
        for step in range((resumed or 0) + 1, stop + 1):
            writer.report("training", step)
            time.sleep(pause)
    def wait(): time.sleep(1000)
    def kill(): os.kill(os.getpid(), signal.SIGKILL)
"""


def program(text: str) -> str:
    """A script in which `train(stop)` reports steps as a fit would, and `wait()` waits for a peer that is gone."""
    return f"{inspect.cleandoc(_HELPERS)}\n{inspect.cleandoc(text)}\n"


def events(folder: Path) -> list[dict]:
    """The launcher's events of the only run in a folder."""
    (path,) = folder.glob("tfdist-logs/*/events.jsonl")
    return [event for event in map(json.loads, path.read_text().splitlines()) if event["name"] == "launcher"]


def of_kind(folder: Path, kind: str) -> list[dict]:
    return [event for event in events(folder) if event["event"] == kind]
