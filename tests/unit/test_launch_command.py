from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tfdist
from tfdist.launcher.command import main


def invoke(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], ["nothing to run", "tfdist run -n 2 train.py"]),
        (["run", "nowhere.py"], ["nowhere.py: no such script in", "-m MODULE"]),
        (["run", "-n", "0", "t.py"], ["--workers 0: expected at least 1", "-n 1"]),
        (["run", "-n", "two", "t.py"], ["'two' is not a valid integer"]),
        (["run", "-n", "1:two", "t.py"], ["'1:two' is not a valid integer", "MIN:MAX such as 1:3"]),
        (["run", "-n", "3:1", "t.py"], ["'3:1': expected MIN:MAX with 1 <= MIN <= MAX"]),
        (["run", "-n", "0:2", "t.py"], ["'0:2': expected MIN:MAX with 1 <= MIN <= MAX"]),
        (["run", "--hang-timeout", "soon", "t.py"], ["'soon': expected a positive number of seconds, or auto"]),
        (["run", "--hang-timeout", "0", "t.py"], ["'0': expected a positive number of seconds, or auto"]),
        (["run", "--start-timeout", "0", "t.py"], ["0 is not in the range x>0"]),
        (["run", "--max-restarts", "-1", "t.py"], ["-1 is not in the range x>=0"]),
        (["run", "--unknown", "t.py"], ["No such option", "--unknown"]),
        (["run", "--env", "FOO", "t.py"], ["'FOO': expected KEY=VALUE"]),
        (["run", "--env", "=1", "t.py"], ["'=1': expected KEY=VALUE"]),
        (["run", "--cpus-per-worker", "few", "t.py"], ["'few': expected a whole number or auto"]),
        (["run", "--cpus-per-worker", "0", "t.py"], ["0: expected at least 1, or auto"]),
        (["run", "--output", "none", "t.py"], ["'none' is not one of 'chief', 'all'"]),
    ],
)
def test_usage_errors(arguments: list[str], words: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.output


def test_version() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.output) == (0, f"tfdist {tfdist.__version__}\n")


def test_help_of_run_shows_the_script() -> None:
    assert "run [OPTIONS] SCRIPT [ARGS]..." in invoke("run", "--help").output


def test_help_of_run_says_when_an_evaluator_is_stopped() -> None:
    text = " ".join(invoke("run", "--help").output.split())
    assert "Start an evaluator, too; it may outlast the training by --grace." in text
    assert "Seconds before SIGKILL; also until an evaluator is stopped once the training has ended." in text


def loaded_after(code: str) -> set[str]:
    """The modules that a new interpreter has after running some code."""
    code += "\nimport sys\nprint(*sys.modules, file=sys.stderr)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(answer.stderr.split())


def test_help_loads_little() -> None:
    show_help = "from tfdist.launcher.command import main\nmain(['--help'], standalone_mode=False)"
    loaded = loaded_after(show_help) - loaded_after("")
    installed = {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names
    assert installed == {"tfdist", "click", "lazy_loader"}
    # Of tfdist: what names the commands, but nothing that runs one.
    assert "tfdist.launcher.command" in loaded
    assert not {"tfdist.launcher.run", "tfdist.strategies", "tfdist.checkpoint", "tfdist.planning.prediction"} & loaded


def test_launcher_imports_no_tensorflow(tmp_path: Path) -> None:
    code = (
        "import sys, tfdist.launcher.command, tfdist.launcher.run, tfdist.launcher.report\n"
        "print(sorted({'tensorflow', 'keras', 'numpy', 'rich'} & set(sys.modules)))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (answer.stdout, answer.stderr) == ("[]\n", "")
