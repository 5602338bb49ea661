"""Modules that are hidden until a script imports them; with stand-ins for the real packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREAMBLE = """
import os, sys, types
from tfdist.launch.preloaded import PreloadedModules

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
