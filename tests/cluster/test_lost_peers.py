"""Who is gone is said by those that are left, where no launcher of tfdist does."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import tfdist
from tests.processes import forked
from tests.tiers import daily
from tfdist.cluster import ports
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster

_DEADLINE = 120
PROGRAM = """
import os, signal, sys
import keras, numpy as np
import tfdist
strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
class End(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5 and strategy._peers.rank == int(sys.argv[1]):
            if sys.argv[2] == "raise":
                raise ValueError("the program's own")
            os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[sys.argv[2]])
model.fit(np.ones((6400, 4)), np.ones((6400, 1)), batch_size=32, verbose=0, shuffle=False, callbacks=[End()])
"""


def reads_late() -> list[int]:
    """Runs on every process: rank 0 ends as soon as it has told all, which rank 1 reads a second later."""
    import tfdist

    peers = tfdist.MultiWorkerMirroredStrategy(start_timeout=60)._peers
    hear = peers.hear

    def late(*arguments: Any, **more: Any) -> Any:
        time.sleep(1.0)
        return hear(*arguments, **more)

    if peers.rank == 1:
        peers.hear = late
    return peers.gather("last words", peers.rank, "say the last words")


def train(folder: Path, size: int, transport: str, *arguments: str) -> tuple[list[str], list[tuple[int, str]]]:
    """The addresses, and exit code and output of each process."""
    (folder / "train.py").write_text(PROGRAM)
    processes = []
    with ports.reserve(size) as reservation:
        places = [f"127.0.0.1:{port}" for port in reservation.ports]
        try:
            for index in range(size):
                config = json.dumps({"cluster": {"worker": places}, "task": {"type": "worker", "index": index}})
                env = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
                env["TFDIST_TRANSPORT"] = transport
                processes.append(forked(["train.py", *arguments], folder / f"log-{index}", folder, env, index))
            stopped = int(arguments[0]) if arguments[1] == "stop" else None
            codes = [None if index == stopped else process.wait(_DEADLINE) for index, process in enumerate(processes)]
            return places, [(code, (folder / f"log-{index}").read_text()) for index, code in enumerate(codes)]
        finally:
            for process in processes:
                process.kill()


WAYS = [(0, "kill", -9, "direct"), (1, "kill", -9, "tensorflow"), (2, "raise", 1, "direct")]


@pytest.mark.timeout(_DEADLINE + 30)
@pytest.mark.parametrize(("rank", "how", "code", "transport"), daily(WAYS, "0"))
def test_who_is_gone_is_named_below_the_traceback(rank, how, code, transport, tmp_path):
    places, results = train(tmp_path, 3, transport, str(rank), how)
    assert results[rank][0] == code
    assert " is gone" not in results[rank][1]
    only = f"tfdist: worker {rank} ({places[rank]}) is gone; what it has printed, and the log of the system that"
    said = []
    for survivor in {0, 1, 2} - {rank}:
        found, text = results[survivor]
        print(text)
        assert found == 1
        lines = text.splitlines()
        (at,) = (number for number, line in enumerate(lines) if line.startswith("tfdist: worker "))
        # Who hears of it from another survivor only, by its end, finds both gone.
        assert f"worker {rank} ({places[rank]})" in lines[at]
        said.append(lines[at])
        assert "Start the job again, all of its tasks: with tfdist.callbacks.BackupAndRestore it goes on" in lines[at]
        traceback = next(number for number, line in enumerate(lines) if line.startswith("Traceback"))
        operation = "CollectiveReduce" if transport == "tensorflow" else "Collective sum of the replicas: worker "
        assert any(operation in line for line in lines[traceback:at])
    assert any(line.startswith(only) for line in said)


@pytest.mark.nightly
@pytest.mark.timeout(_DEADLINE + 30)
def test_who_is_stopped_is_not_waited_for(tmp_path):
    # TensorFlow's coordination service has told the others, which wait for shared memory.
    _, (_, *results) = train(tmp_path, 3, "direct", "0", "stop")
    for found, text in results:
        print(text)
        assert found == 1
        assert "Collective sum of the replicas: Collective ops is aborted by: " in text


def test_what_is_said_of_whom(monkeypatch):
    from tfdist.runtime.job import GONE, SILENT, THERE, lost, state_of

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # nobody listens there yet, and nobody else can
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        assert state_of(place, 60.0) == GONE
        listener.listen()
        assert state_of(place, 60.0) == THERE
    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_connection", mock.Mock(side_effect=TimeoutError))
        assert state_of(place, 1.0) == SILENT
    assert lost({"worker 1 (b:1)": THERE}) == ""
    both = lost({"worker 1 (b:1)": GONE, "worker 2 (c:1)": GONE, "worker 3 (d:1)": SILENT})
    assert both.startswith("worker 1 (b:1), worker 2 (c:1) are gone, and worker 3 (d:1) does not answer")
    assert "; the first of them to end is the cause; what they have printed, and the log" in both
    assert lost({f"worker {index}": GONE for index in range(20)}).partition(" are")[0].endswith("worker 7 and 12 more")


def test_nothing_else_changes_what_is_shown(monkeypatch):
    from tfdist.runtime import job

    shown: list[type] = []
    with ports.reserve(2) as reservation:
        cluster = tfdist.ClusterConfig({"worker": [f"127.0.0.1:{port}" for port in reservation.ports]}, "worker", 0)

    def before(kind: type[BaseException], error: BaseException, trace: object) -> None:
        shown.append(kind)

    monkeypatch.setattr(sys, "excepthook", before)
    monkeypatch.setattr(job, "_ask", lambda cluster: pytest.fail("asked"))
    monkeypatch.setenv("TFDIST_RUN_ID", "1")
    job.name_lost_peers(cluster)
    assert sys.excepthook is before  # the launcher names whoever failed
    monkeypatch.delenv("TFDIST_RUN_ID")
    job.name_lost_peers(cluster)
    sys.excepthook(ValueError, ValueError("Collective"), None)
    assert shown == [ValueError]


def test_the_last_words_of_rank_0_are_heard():
    assert run_local(reads_late, 2, timeout=120) == [[0, 1]] * 2
