"""Workers forked from a process that has imported TensorFlow: they must be like workers that are started afresh."""

from __future__ import annotations

import ast
import json
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.launcher.forked_workers import Workers, wait
from tfdist.cluster.ports import reserve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forking from a zygote needs Linux"),
]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(tmp_path_factory.mktemp("zygote")) as made:
        yield made


FACTS = """
    import os, signal, sys
    print(repr({
        "argv": sys.argv, "orig": sys.orig_argv, "path": sys.path, "names": sorted(globals()), "file": __file__,
        "flags": str(sys.flags), "cwd": os.getcwd(), "descriptors": sorted(os.listdir("/proc/self/fd")),
        "input": os.readlink("/proc/self/fd/0"), "encodings": [sys.stdout.encoding, sys.stderr.errors],
        "leads": os.getpid() == os.getpgid(0) == os.getsid(0), "nice": os.nice(0),
        "policies": {os.sched_getscheduler(int(task)) for task in os.listdir("/proc/self/task")},
        "env": dict(os.environ),
        "signals": {int(s): str(signal.getsignal(s)) for s in signal.valid_signals() if s != signal.SIGINT},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "imported": [name for name in ("numpy", "tensorflow", "keras", "tfdist") if name in sys.modules],
    }))
"""
# What TensorFlow and what it imports in turn set for themselves.
SET_BY_IMPORTS = ("TF2_", "TPU_", "KMP_", "HDF5_", "ENABLE_RUNTIME_")


def test_worker_finds_what_a_fresh_one_finds(workers: Workers) -> None:
    (code, warm), (fresh_code, fresh) = workers.run(FACTS), workers.run_afresh(FACTS)
    assert (code, fresh_code) == (0, 0), warm + fresh
    found, expected = ast.literal_eval(warm), ast.literal_eval(fresh)
    for facts in (found, expected):  # this process may have imported it, too, and passes its environment on
        facts["env"] = {name: value for name, value in facts["env"].items() if not name.startswith(SET_BY_IMPORTS)}
    assert found == expected
    assert found["leads"] is True
    assert found["imported"] == []


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("print('half a line', end=''); raise SystemExit", 0),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("def f():\n    raise ValueError('no luck')\nf()", 1),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0),
        pytest.param("import tensorflow as tf\ntf.constant(1) + tf.constant('a')", 1, marks=pytest.mark.exhaustive),
    ],
)
def test_ends_like_a_fresh_one(workers: Workers, script: str, code: int) -> None:
    warm, fresh = workers.run(script), workers.run_afresh(script)
    assert warm[0] == fresh[0] == code
    # TensorFlow's import speaks on standard error.
    shown = [line for line in fresh[1].splitlines() if not line.startswith(("I0000", "WARNING: All log"))]
    assert warm[1].splitlines() == shown


def test_priority_is_normal_although_the_imports_had_a_low_one(workers: Workers) -> None:
    script = """
        import os, numpy, tensorflow
        numpy.ones((500, 500)) @ numpy.ones((500, 500))
        tensorflow.matmul(tensorflow.ones((500, 500)), tensorflow.ones((500, 500)))
        tasks = [int(task) for task in os.listdir("/proc/self/task")]
        print(len(tasks) > 2, {(os.sched_getscheduler(task), os.getpriority(os.PRIO_PROCESS, task)) for task in tasks})
    """
    code, output = workers.run(script, {"OMP_NUM_THREADS": "2"})
    normal = os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, 0)
    assert (code, output.splitlines()[-1]) == (0, f"True { {normal} }")


def test_environment_and_cores_are_its_own(workers: Workers) -> None:
    script = "import os; print(os.environ.get('TFDIST_X'), os.environ.get('TF_CONFIG'), os.sched_getaffinity(0))"
    core = max(os.sched_getaffinity(0))
    assert workers.run(script, {"TFDIST_X": "1"}, [core]) == (0, f"1 None {{{core}}}\n")
    assert workers.run(script, {"TF_CONFIG": "{}"}) == (0, f"None {{}} {os.sched_getaffinity(0)}\n")


def test_native_code_sees_the_environment(workers: Workers) -> None:
    script = "import ctypes; c = ctypes.CDLL(None); c.getenv.restype = ctypes.c_char_p; print(c.getenv(b'TFDIST_X'))"
    assert workers.run(script, {"TFDIST_X": "ä"})[1] == f"{'ä'.encode()!r}\n"
    assert workers.run(script)[1] == "None\n"


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.exhaustive
def test_numbers_of_threads_are_its_own(workers: Workers, threads: int) -> None:
    script = """
        import os
        import numpy as np, tensorflow as tf
        np.ones((600, 600)) @ np.ones((600, 600))
        tf.constant(1.0)
        names = [open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")]
        print(names.count(open("/proc/self/comm").read()), sum(name.startswith("tf_") for name in names))
    """
    env = {"OMP_NUM_THREADS": str(threads), "TF_NUM_INTRAOP_THREADS": str(threads), "TF_NUM_INTEROP_THREADS": "5"}
    warm, fresh = workers.run(script, env), workers.run_afresh(script, env)
    assert warm[0] == 0, warm[1]
    assert warm[1].splitlines() == fresh[1].splitlines()[-1:]


DRAW = """
    import json, random
    import numpy as np, tensorflow as tf, keras

    @tf.function
    def draw():
        return tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32)

    print(json.dumps([
        random.random(), np.random.rand(), int(tf.random.uniform([], maxval=2**31 - 1, dtype=tf.int32)), int(draw()),
        int(keras.random.SeedGenerator().state[0]), float(keras.initializers.GlorotUniform()([1])[0]),
        int(tf.random.Generator.from_non_deterministic_state().uniform([], maxval=2**31 - 1, dtype=tf.int32)),
    ]))
"""


def test_each_draws_other_random_numbers(workers: Workers) -> None:
    draws = [json.loads(workers.run(DRAW)[1].splitlines()[-1]) for _ in range(3)]
    assert [len(set(drawn)) for drawn in zip(*draws, strict=True)] == [3] * 7


@pytest.mark.exhaustive
def test_seeds_give_the_same_numbers_as_in_a_fresh_one(workers: Workers) -> None:
    script = """
        import keras, numpy as np, tensorflow as tf
        keras.utils.set_random_seed(7)
        layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential(layers)
        model.compile("adam", "mse")
        x = np.random.rand(64, 4)
        history = model.fit(x, x[:, :1], epochs=2, batch_size=16, verbose=0)
        print(history.history["loss"], float(tf.random.normal([])), model.name, [layer.name for layer in layers])
    """
    warm, fresh = workers.run(script), workers.run_afresh(script)
    assert warm[0] == 0, warm[1]
    assert warm[1].splitlines()[-1] == fresh[1].splitlines()[-1]


@pytest.mark.exhaustive
def test_setting_made_before_the_import_is_obeyed(workers: Workers) -> None:
    script = """
        import os
        print("begin", "zygote" in open("/proc/self/cmdline").read())
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
        import tensorflow as tf
        from tensorflow.python.util import _pywrap_util_port as port
        print(port.IsMklEnabled(), os.environ["TFDIST_X"])
    """
    code, output = workers.run(script, {"TFDIST_X": "1"})
    lines = [line for line in output.splitlines() if not line.startswith(("I0000", "WARNING"))]
    # It had to begin again, as a process of its own kind.
    assert (code, lines) == (0, ["begin True", "begin False", "False 1"])


def test_import_of_tfdist_is_the_scripts_own(workers: Workers) -> None:
    (workers.folder / "tfdist").mkdir()
    try:
        (workers.folder / "tfdist" / "__init__.py").write_text("print('own')")
        assert workers.run("import tfdist") == (0, "own\n")
    finally:
        (workers.folder / "tfdist" / "__init__.py").unlink()
        (workers.folder / "tfdist" / "__init__.py").parent.rename(workers.folder / "gone")


@pytest.mark.cluster
def test_two_workers_train_together(workers: Workers) -> None:
    workers.write(
        """
        import tfdist, keras, numpy as np, tensorflow as tf
        strategy = tfdist.MultiWorkerMirroredStrategy()
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.arange(64.0).reshape(16, 4) / 64
        print("loss", model.fit(x, x[:, :1], epochs=2, batch_size=8, verbose=0).history["loss"])
        """
    )
    with reserve(2, host="127.0.0.1") as reservation:
        cluster = {"worker": [f"127.0.0.1:{port}" for port in reservation.ports]}
        started = []
        for index in range(2):
            config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
            started.append(workers.start(f"output-{index}", {"TF_CONFIG": config}))
        codes = [wait(worker, 120) for worker in started]
    outputs = [(workers.folder / f"output-{index}").read_text() for index in range(2)]
    assert codes == [0, 0], "\n".join(outputs)
    losses = [output[output.index("loss [") :] for output in outputs]
    assert losses[0] == losses[1]
