"""Programs run as `__main__` in a process that has done something else before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import tfdist

SOURCE = Path(tfdist.__file__).parent.parent
DRIVER = """
import sys
from tfdist.launcher.main_program import first_path, run_as_main
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
            [sys.executable, "-u", *start, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=60
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
