"""`tfdist.launch` in notebooks: what a cell shows and returns, the stop button, kernels that are killed."""

from __future__ import annotations

import ast
import os
import shutil
import signal
import sys
from pathlib import Path

import nbformat
import pytest

from tests.launcher.conftest import SOURCE, wait_until
from tests.launcher.function.kernels import error, execute, kernel, notebook, printed

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

# Each names one of two processes.
_WAIT = """
def wait(folder):
    import os, time, tfdist
    with open(f"{folder}/{tfdist.discover().rank}", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name + ".pid")
    time.sleep(1000)
"""


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jupyter writes nothing outside of the test's folder, and takes this Python."""
    for name in ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("PYTHONPATH", str(SOURCE))


def test_a_notebook(folder):
    cells = execute(
        notebook(
            [
                "import functools, time, tfdist\nfactor = 3",
                "def times(x):\n    return factor * x\n\nclass Point:\n    def __init__(self, x):\n        self.x = x",
                """
def work(n):
    for i in range(1, n + 1):  # as the progress bar of Keras does it
        print("\\b" * 9 + "\\r" + f"\\x1b[1m{i:4}/{n}\\x1b[0m", end="", flush=True)
        time.sleep(0.01)
    print("  done")
    return Point(times(n))

begun = time.monotonic()
point = tfdist.launch(work, (300,))
(isinstance(point, Point), point.x, time.monotonic() - begun)""",
                """
def fail(x):
    if tfdist.discover().rank == 1:
        return factor[x]  # a mistake
    time.sleep(1000)

tfdist.launch(functools.partial(fail, x=5))""",
                "import asyncio\nawait asyncio.to_thread(tfdist.launch, lambda: 'beside the loop')",
            ]
        ),
        folder,
        coalesce=False,
    )
    _, _, worked, failed, beside = cells
    assert error(worked) == ""
    lines = printed(worked).splitlines()
    assert lines[0].startswith("tfdist: 2 workers on this machine; output of worker 1 goes to tfdist-logs/")
    assert lines[1:] == [" 300/300  done"]
    is_point, x, seconds = ast.literal_eval(worked.outputs[-1]["data"]["text/plain"])
    assert (is_point, x) == (True, 900)
    # Live, and yet no output for each of the 300 states, which took three seconds or more, but four a second at most.
    streams = [output["text"] for output in worked.outputs if output.get("name") == "stdout"]
    assert any("\x1b[1m" in text and " 300/300" not in text for text in streams)
    assert len(streams) <= 8 + 4 * seconds

    message = error(failed)
    assert message.startswith("LaunchError: worker 1 raised TypeError: 'int' object is not subscriptable\n")
    assert "in fail\n    return factor[x]  # a mistake\n" in message
    assert "Traceback" not in printed(failed)
    assert beside.outputs[-1]["data"]["text/plain"] == "'beside the loop'"


def test_stopped_and_killed(folder):
    """The stop button ends the workers and leaves a kernel that works; whoever kills the kernel kills the workers."""
    ready = [folder / f"{rank}.pid" for rank in range(2)]

    def started(message: str) -> list[int]:
        wait_until(lambda: all(path.exists() for path in ready), 120, f"both processes of {message}")
        pids = [int(path.read_text()) for path in ready]
        for path in ready:
            path.unlink()
        return pids

    with kernel(folder) as running:
        assert running.run(f"import tfdist\n{_WAIT}") == ""
        message = running.client.execute(f"tfdist.launch(wait, ({str(folder)!r},))")
        pids = started(message)
        assert set(pids) <= running.marked()
        running.manager.interrupt_kernel()
        assert running.answer(message) == "KeyboardInterrupt"
        wait_until(lambda: not running.marked(), 60, "the end of the workers")
        assert running.run("assert tfdist.launch(lambda: 5) == 5") == ""

        started(running.client.execute(f"tfdist.launch(wait, ({str(folder)!r},))"))
        assert len(running.marked()) >= 2
        os.kill(running.pid, signal.SIGKILL)
        wait_until(lambda: not running.marked(), 60, "the end of the workers of the dead kernel")


@pytest.mark.slow
@pytest.mark.nightly
def test_the_example(folder):
    """examples/notebook.ipynb, as it is."""
    pytest.importorskip("sklearn")
    shutil.copy(SOURCE / "examples" / "notebook.ipynb", folder)
    cells = execute(nbformat.read(folder / "notebook.ipynb", as_version=4), folder)
    assert [error(cell) for cell in cells] == [""] * len(cells)
    launched, shown, predicted = cells[-3:]
    lines = printed(launched).splitlines()
    assert lines[1::2] == [f"Epoch {epoch}/5" for epoch in range(1, 6)]
    assert all(line.startswith("25/25 ━") and "val_loss" in line for line in lines[2::2])
    assert len(lines) == 11
    assert len(printed(shown).splitlines()) == 5
    accuracy = printed(predicted).split()[-1]
    assert float(accuracy) > 0.9
    # What the last epoch showed is what the model that came back has: it is the trained one.
    assert float(printed(shown).split()[-1]) == pytest.approx(float(accuracy), abs=0.002)
    assert (folder / "digits.keras").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_classes_and_loops_of_cells(folder):
    """Keras reads classes of cells by their registered names, and tf.function their loops from their text."""
    cells = execute(
        notebook(
            [
                "import keras, numpy as np, tensorflow as tf, tfdist",
                """
@keras.saving.register_keras_serializable("strangers")
class Doubled(keras.layers.Layer):
    def call(self, x):
        return 2 * x

@tf.function
def sum_of_even(n):
    total = 0
    for i in tf.range(n):  # a loop of the graph
        if i % 2 == 0:
            total += i
    return total

class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
    def call(self, x):
        return self.dense(x)
""",
                """
def train(subclassed=False):
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = Net() if subclassed else keras.Sequential([keras.Input((4,)), Doubled(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    history = model.fit(np.ones((16, 4)), np.ones((16, 1)), batch_size=8, verbose=0)
    assert sum_of_even(tf.constant(5)).numpy() == 6
    return (history if subclassed else (history, model, model.predict(np.ones((2, 4)), verbose=0)))

history, model, predicted = tfdist.launch(train)
assert history.model is None and len(history.history["loss"]) == 1
assert isinstance(model.layers[0], Doubled)
np.testing.assert_allclose(model.predict(np.ones((2, 4)), verbose=0), predicted, rtol=1e-5)""",
                "len(tfdist.launch(train, (True,)).history['loss'])",
                "tfdist.launch(lambda: model.layers)",
            ]
        ),
        folder,
    )
    *good, refused = cells
    assert [error(cell) for cell in good] == [""] * 4
    assert error(refused).startswith(
        "TypeError: launch: `model`, which `<lambda>` uses: a model or layer (Sequential) b"
    )


@pytest.mark.nightly
def test_the_kernel_is_that_of_these_tests(folder):
    """Otherwise the notebooks here would try another tfdist."""
    (cell,) = execute(notebook(["import sys, tfdist; sys.executable, tfdist.__file__"]), folder)
    assert cell.outputs[0]["data"]["text/plain"] == repr((sys.executable, str(SOURCE / "tfdist" / "__init__.py")))
