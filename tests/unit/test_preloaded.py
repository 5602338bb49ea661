"""Scripts in a process that has imported TensorFlow before: settings, hidden modules, and running as `__main__`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tfdist
from tfdist.launcher.warm.preloaded import changed_for_import, first_path, shared_part


def test_processes_of_a_run_share_all_but_what_the_launcher_gives_to_each() -> None:
    first = {"HOME": "/h", "TF_CONFIG": "a", "TFDIST_RESTART": "0", "OMP_NUM_THREADS": "1", "TF_X": "1"}
    second = {"HOME": "/h", "TF_CONFIG": "b", "CUDA_VISIBLE_DEVICES": "1", "TF_NUM_INTRAOP_THREADS": "2", "TF_X": "1"}
    assert shared_part(first) == shared_part(second) == {"HOME": "/h", "TF_X": "1"}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"TF_ENABLE_ONEDNN_OPTS": "0"}, ["TF_ENABLE_ONEDNN_OPTS"]),
        ({"XLA_FLAGS": "a"}, {}, ["XLA_FLAGS"]),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, ["OMP_NUM_THREADS"]),
        ({}, {"TF_USE_LEGACY_KERAS": "1", "KERAS_HOME": "/k"}, ["KERAS_HOME", "TF_USE_LEGACY_KERAS"]),
        ({}, {"KERAS_BACKEND": "jax"}, ["KERAS_BACKEND"]),
        ({}, {"KERAS_BACKEND": "tensorflow"}, []),
        ({}, {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_CONFIG": "{}"}, []),
        ({}, {"WANDB_MODE": "offline", "TFDIST_PROGRESS": "/p"}, []),
        ({"TF_X": "1"}, {"TF_X": "1"}, []),
    ],
)
def test_what_a_script_may_have_changed(before: dict, after: dict, expected: list[str]) -> None:
    assert changed_for_import(before, after) == expected


PREAMBLE = """
import os, sys, types
from tfdist.launcher.warm.preloaded import PreloadedModules

def start_over():
    print("start over")
    raise SystemExit

real = {}
for name in ("numpy", "numpy.random", "tensorflow", "tensorflow.python", "keras"):
    real[name] = sys.modules[name] = types.ModuleType(name)
    real[name].__path__ = []
    if "." in name:
        setattr(real[name.partition(".")[0]], name.partition(".")[2], real[name])
finders = list(sys.meta_path)
PreloadedModules(start_over).hide()
assert not set(real) & set(sys.modules)
"""


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        ("import numpy; print(numpy is real['numpy'], 'tensorflow' in sys.modules)", "True False"),
        ("import numpy.random; print(numpy.random is real['numpy.random'])", "True"),
        ("from tensorflow.python import __name__; print(__name__)", "tensorflow.python"),
        ("import keras; print(all(sys.modules[n] is real[n] for n in real), sys.meta_path == finders)", "True True"),
        ("import tensorflow; os.environ['TF_X'] = '1'; import keras; print('later')", "later"),
        ("os.environ['TF_X'] = '1'; print('before'); import tensorflow", "before\nstart over"),
        ("import numpy; os.environ['XLA_FLAGS'] = ''; import keras", "start over"),
        ("os.environ['WANDB_MODE'] = '1'; import tensorflow; print('same')", "same"),
        ("import json; print(json.__name__)", "json"),
    ],
)
def test_first_import_decides(statements: str, expected: str) -> None:
    result = subprocess.run([sys.executable, "-c", PREAMBLE + statements], capture_output=True, text=True, timeout=30)
    assert (result.stderr, result.stdout.strip()) == ("", expected)


SOURCE = Path(tfdist.__file__).parent.parent
DRIVER = """
import sys
from tfdist.launcher.warm.preloaded import first_path, run_as_main
words = sys.argv[1:]
sys.path[0] = first_path(words)
run_as_main(words, [sys.executable, "-u", *words], hidden_files=[__file__])
"""


def compare(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs words both ways; returns the result of both, which are equal."""
    driver = folder.parent / f"{folder.name}-driver.py"
    driver.write_text(DRIVER)
    env = {"PYTHONPATH": str(SOURCE)}
    results = [
        subprocess.run(
            [sys.executable, "-u", *start, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=30
        )
        for start in ([], [str(driver)])
    ]
    plain, ours = ((result.returncode, result.stdout, result.stderr) for result in results)
    assert ours == plain
    return results[1]


FACTS = """
import pickle, sys
class Thing: pass
assert sys.modules["__main__"].Thing is Thing
assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
print(sys.argv, sys.orig_argv, sys.path, sys.flags, __name__, __file__, __package__)
print({name: str(value) for name, value in sorted(globals().items()) if name not in ("__loader__", "__spec__")})
print(type(__loader__).__name__, __loader__.path, __spec__ and (__spec__.name, __spec__.origin))
"""


def test_facts_of_a_script(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.py").write_text(FACTS)
    assert "--epochs" in compare(tmp_path, ["folder/train.py", "--epochs", "-m", "3"]).stdout


def test_path_of_a_linked_script(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "real.py").write_text("import sys; print(sys.path[0], __file__, sys.argv)")
    (tmp_path / "train.py").symlink_to("folder/real.py")
    assert compare(tmp_path, ["train.py"]).stdout.startswith(str(tmp_path / "folder "))


def test_facts_of_a_module(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("value = 5")
    (tmp_path / "package" / "train.py").write_text("from package import value\nfrom . import value" + FACTS)
    assert "package" in compare(tmp_path, ["-m", "package.train", "a b"]).stdout


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("print('fine')", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('text')", 1),
        ("def f():\n    raise ValueError('x')\nf()", 1),
        ("try:\n    1 / 0\nexcept ArithmeticError as e:\n    raise RuntimeError('y') from e", 1),
        ("x = (", 1),
        ("raise KeyboardInterrupt", -2),
        ("import os; os._exit(4)", 4),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import atexit; atexit.register(print, 'last'); raise SystemExit(3)", 3),
        ("import threading; threading.Timer(0.2, print, ['late']).start(); print('first')", 0),
        ("import sys; sys.excepthook = lambda *_: print('mine'); 1 / 0", 1),
        ("print(__annotations__); x: int = 1; print(__annotations__)", 0),
    ],
)
def test_ends_alike(tmp_path: Path, script: str, code: int) -> None:
    (tmp_path / "train.py").write_text(script + "\n")
    assert compare(tmp_path, ["train.py"]).returncode == code


def test_module_that_is_missing(tmp_path: Path) -> None:
    result = compare(tmp_path, ["-m", "nothing.here"])
    assert result.returncode == 1
    assert "No module named 'nothing'" in result.stderr


def test_first_path() -> None:
    assert first_path(["/nowhere/a/train.py", "x"]) == "/nowhere/a"
