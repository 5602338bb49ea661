"""Interrupts the same jobs with Keras' BackupAndRestore and with tfdist's, and prints what comes of them as a table.

Example:
    python tools/compare_backups.py                              # prints it
    python tools/compare_backups.py docs/fault-tolerance.md      # writes it between the marks in that file
"""

from __future__ import annotations

import contextlib
import io
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(_ROOT))

from benchmarks.data_parallel.table import fill  # noqa: E402
from tests.fault_tolerance.forked_jobs import Ended, ForkedJobs  # noqa: E402
from tests.fault_tolerance.job import Job  # noqa: E402
from tests.fault_tolerance.trials import KILLED, Case, Outcome, Trials, about, interrupted  # noqa: E402

BEGIN, END = "<!-- comparison -->", "<!-- /comparison -->"
_KILLS_WHILE_WRITING = 16

# Nothing but what a row is about: no Dropout, no other callbacks, rows in their order.
PLAIN = Job(model="without Dropout", callbacks=(), validation="", fit={"shuffle": False})
MIDDLE = {"when": "on_train_batch_begin", "number": 13}
EARLIER = {"when": "on_train_batch_begin", "number": 8}
EVERY_EPOCH = {"save_freq": "epoch"}
EVERY_SECOND_STEP = {"save_freq": 2}


def interruptions(backup: Callable[[dict], dict]) -> list[Case]:
    """The cases in which a job is killed and started again.

    Args:
        backup: makes the arguments of the callback of these, which both have.
    """
    epochs, steps = backup(EVERY_EPOCH), backup(EVERY_SECOND_STEP)
    callbacks = PLAIN.with_(callbacks=("early", "plateau"), validation="arrays")
    return [
        interrupted("a plain model with Adam, saved every epoch", PLAIN.with_(backup=epochs), MIDDLE),
        interrupted("saved every 2 steps, killed in an epoch", PLAIN.with_(backup=steps), MIDDLE),
        interrupted("the same, killed twice", PLAIN.with_(backup=steps), MIDDLE, EARLIER),
        interrupted("Dropout", PLAIN.with_(model="replicated", backup=epochs), MIDDLE),
        interrupted(
            "EarlyStopping and ReduceLROnPlateau, killed three times", callbacks.with_(backup=epochs), *[EARLIER] * 3
        ),
        interrupted("arrays with `shuffle=True`", PLAIN.with_(fit={}, backup=epochs), MIDDLE),
        interrupted("`tf.data` with `shuffle`", PLAIN.with_(data="shuffle", fit={}, backup=epochs), MIDDLE),
        interrupted("CSVLogger", PLAIN.with_(callbacks=("csv",), backup=epochs), MIDDLE),
        interrupted(
            "killed in validation", callbacks.with_(backup=epochs), {"when": "on_test_batch_begin", "number": 9}
        ),
        interrupted("one bit flipped in the newest backup", PLAIN.with_(backup=epochs), MIDDLE, between=_flip_newest),
    ]


def _flip_newest(folder: Path) -> None:
    files = [path for path in (folder / "backup").rglob("*") if path.suffix in (".h5", ".data-00000-of-00001")]
    newest = max(files, key=lambda path: (path.stat().st_mtime_ns, path.name))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)


def verdict(outcome: Outcome) -> str:
    """What a job that was started again has come to, in a few words."""
    *interrupted_runs, last = outcome.runs
    if any(run.code != KILLED for run in interrupted_runs):
        raise RuntimeError(f"A job ended before it was killed:\n{interrupted_runs[0].log}")
    if last.code != 0:
        return f"**cannot start again**: {_error(last)}"
    kinds = about(outcome.differences) - {"observer", "random"}
    different = [name for name in ("weights", "optimizer", "history", "epochs", "csv") if name in kinds]
    return ", ".join(different) or "nothing"


def _error(ended: Ended) -> str:
    lines = [line for line in ended.log.splitlines() if line and not line.startswith(" ")]
    return lines[-1].split(":")[0] if lines else f"exit code {ended.code}"


def killed_while_writing(jobs: ForkedJobs, folder: Path, backup: dict) -> str:
    """How many of many kills at random moments leave a backup that no restart can load."""
    chance, unloadable = random.Random(1), 0
    job = PLAIN.with_(model="large", epochs=400, steps_per_execution=1, backup=backup)
    for trial in range(_KILLS_WHILE_WRITING):
        place = folder / str(trial)
        # From outside: a thread of the process itself would wait until Python's lock is free, which is between writes.
        started = jobs.start(job, place)
        while not (any((place / "backup").glob("*")) or started.process.poll() is not None):
            time.sleep(0.01)
        time.sleep(chance.uniform(0.5, 1.5))
        started.kill()
        first = started.wait()
        if first.code != KILLED:
            raise RuntimeError(f"The job ended before it was killed:\n{first.log}")
        unloadable += jobs.run(job.with_(epochs=0), place).code != 0
    return f"**{unloadable} of {trial + 1} unloadable**" if unloadable else f"all {trial + 1} loadable"


def finished_again(jobs: ForkedJobs, folder: Path, backup: dict) -> str:
    """What a job does that has finished and is started again."""
    jobs.run(PLAIN.with_(backup=backup), folder)
    steps = jobs.run(PLAIN.with_(backup=backup), folder).result["steps of this process"]
    return f"trains again ({steps} executions)" if steps else "returns at once, with its history"


def table(rows: list[tuple[str, str, str]]) -> str:
    """The table in Markdown; jobs with the same outcome share a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, *outcome in rows:
        names.setdefault(tuple(outcome), []).append(name)
    head = "| Killed and started again | Differs in, with Keras' callback | Differs in, with tfdist's callback |"
    lines = (f"| {'; '.join(joined)} | {' | '.join(outcome)} |" for outcome, joined in names.items())
    return "\n".join([head, "|---|---|---|", *lines])


def compare(folder: Path) -> list[tuple[str, str, str]]:
    """Runs everything, which takes some minutes."""

    def of_keras(backup: dict) -> dict:
        return {**backup, "of_keras": True}

    sides = {"keras": of_keras, "tfdist": dict}
    verdicts: dict[str, dict[str, str]] = {}
    with ForkedJobs() as jobs:
        for side, backup in sides.items():
            trials = Trials(jobs, folder / side)
            for case in interruptions(backup):
                with contextlib.redirect_stdout(io.StringIO()):  # what the jobs print
                    outcome = trials.outcome(case)
                verdicts.setdefault(case.name, {})[side] = verdict(outcome)
            writing = f"killed while writing, {_KILLS_WHILE_WRITING} times"
            every_step = backup({"save_freq": 1})
            verdicts.setdefault(writing, {})[side] = killed_while_writing(jobs, folder / side / "w", every_step)
            again = "finished"
            verdicts.setdefault(again, {})[side] = finished_again(jobs, folder / side / "f", backup(EVERY_EPOCH))
    return [(name, by_side["keras"], by_side["tfdist"]) for name, by_side in verdicts.items()]


def main(arguments: list[str]) -> int:
    """Prints the table, or writes it into the file that is named."""
    with tempfile.TemporaryDirectory() as folder:
        text = table(compare(Path(folder)))
    print(text)
    for name in arguments:
        path = Path(name)
        path.write_text(fill(path.read_text(), text, BEGIN, END))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
