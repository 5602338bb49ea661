"""Who is gone is said by those that are left, where no launcher of tfdist does."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

import tfdist
from tests.processes import forked
from tests.tiers import daily
from tfdist.cluster import ports

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


def train(folder: Path, size: int, transport: str, *arguments: str) -> tuple[list[str], list[tuple[int, str]]]:
    """The addresses, and exit code and output of each process."""
    with ports.reserve(size) as reservation:
        places = [f"127.0.0.1:{port}" for port in reservation.ports]
    (folder / "train.py").write_text(PROGRAM)
    processes = []
    try:
        for index in range(size):
            config = json.dumps({"cluster": {"worker": places}, "task": {"type": "worker", "index": index}})
            env = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
            env["TFDIST_TRANSPORT"] = transport
            processes.append(forked(["train.py", *arguments], folder / f"log-{index}", folder, env, index))
        codes: dict[int, int | None] = {}
        for index, process in enumerate(processes):
            stopped = arguments == (str(index), "stop")
            codes[index] = None if stopped else process.wait(_DEADLINE)
        return places, [(codes[index], (folder / f"log-{index}").read_text()) for index in range(size)]
    finally:
        for process in processes:
            process.kill()


def ways_to_go() -> list:
    cases = [(0, "kill", -9), (1, "kill", -9), (2, "raise", 1)]
    found = [
        pytest.param(*case, way, id=f"{way}, rank {case[0]}") for way in ("direct", "tensorflow") for case in cases
    ]
    return daily(found, "direct, rank 0")


@pytest.mark.timeout(_DEADLINE + 30)
@pytest.mark.parametrize(("rank", "how", "code", "transport"), ways_to_go())
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
        (at,) = (number for number, line in enumerate(lines) if line.startswith("tfdist: "))
        # Who hears of it from another survivor only, by its end, finds both gone.
        assert f"worker {rank} ({places[rank]})" in lines[at]
        said.append(lines[at])
        assert "Start the job again, all of its tasks: with tfdist.callbacks.BackupAndRestore it goes on" in lines[at]
        traceback = next(number for number, line in enumerate(lines) if line.startswith("Traceback"))
        operation = "CollectiveReduce" if transport == "tensorflow" else "Collective sum of the replicas: worker "
        assert any(operation in line for line in lines[traceback:at])
    assert any(line.startswith(only) for line in said)


@pytest.mark.exhaustive
@pytest.mark.timeout(_DEADLINE + 30)
@pytest.mark.parametrize("rank", [0, 1])
def test_who_is_stopped_is_not_waited_for(rank, tmp_path):
    # TensorFlow's coordination service has told the others, which wait for shared memory.
    _, results = train(tmp_path, 3, "direct", str(rank), "stop")
    for survivor in {0, 1, 2} - {rank}:
        found, text = results[survivor]
        print(text)
        assert found == 1
        assert "Collective sum of the replicas: Collective ops is aborted by: " in text


def test_which_exceptions_are_about_peers():
    import tensorflow as tf

    from tfdist.runtime.lost_peers import is_about_peers

    reset = tf.errors.UnavailableError(None, None, "recvmsg:Connection reset by peer")
    led_to = RuntimeError("not saved")
    led_to.__cause__ = reset
    assert is_about_peers(reset) and is_about_peers(led_to)
    assert is_about_peers(tf.errors.InternalError(None, None, "Collective ops is aborted by: ..."))
    own = [ValueError("Collective"), KeyboardInterrupt(), tf.errors.InternalError(None, None, "Blas GEMM failed"), None]
    assert not any(map(is_about_peers, [*own, tf.errors.InvalidArgumentError(None, None, "Collective")]))


def test_what_is_said_of_whom(monkeypatch):
    from tfdist.runtime.lost_peers import GONE, SILENT, THERE, lost, state_of

    with socket.create_server(("127.0.0.1", 0)) as there:
        place = f"127.0.0.1:{there.getsockname()[1]}"
        assert state_of(place, 1.0) == THERE
    assert state_of(place, 1.0) == GONE

    def no_answer(place: tuple[str, int], timeout: float) -> None:
        raise TimeoutError(f"{place}: {timeout}")

    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_connection", no_answer)
        assert state_of(place, 1.0) == SILENT
    assert lost({"worker 1 (b:1)": THERE}) == ""
    assert lost({"worker 1 (b:1)": SILENT, "worker 2 (c:1)": THERE}).startswith(
        "worker 1 (b:1) does not answer: a host that is down, hangs or is cut off; what it has printed"
    )
    both = lost({"worker 1 (b:1)": GONE, "worker 2 (c:1)": GONE, "worker 3 (d:1)": SILENT})
    assert both.startswith("worker 1 (b:1), worker 2 (c:1) are gone, and worker 3 (d:1) does not answer")
    assert "; the first of them to end is the cause; what they have printed, and the log" in both
    assert lost({f"worker {index}": GONE for index in range(20)}).partition(" are")[0].endswith("worker 7 and 12 more")


def test_nothing_else_changes_what_is_shown(monkeypatch):
    from tfdist.runtime import lost_peers

    shown: list[type] = []
    with ports.reserve(2) as reservation:
        cluster = tfdist.ClusterConfig({"worker": [f"127.0.0.1:{port}" for port in reservation.ports]}, "worker", 0)

    def before(kind: type[BaseException], error: BaseException, trace: object) -> None:
        shown.append(kind)

    monkeypatch.setattr(sys, "excepthook", before)
    monkeypatch.setattr(lost_peers, "_ask", lambda cluster: pytest.fail("asked"))
    lost_peers.name_lost_peers(cluster, {"TFDIST_RUN_ID": "1"})
    assert sys.excepthook is before  # the launcher names whoever failed
    lost_peers.name_lost_peers(cluster, {})
    sys.excepthook(ValueError, ValueError("Collective"), None)
    assert shown == [ValueError]
