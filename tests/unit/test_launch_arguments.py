from __future__ import annotations

import sys

import pytest

from tfdist.launcher.arguments import Target, split

WITH_VALUE = {"-n", "--workers", "--env"}


@pytest.mark.parametrize(
    ("arguments", "own", "target"),
    [
        (["train.py"], [], Target("script", ("train.py",))),
        (["-n", "2", "train.py"], ["-n", "2"], Target("script", ("train.py",))),
        (["--workers=2", "t.py", "--workers=9"], ["--workers=2"], Target("script", ("t.py", "--workers=9"))),
        (["t.py", "-n", "5", "--", "-m", "x"], [], Target("script", ("t.py", "-n", "5", "--", "-m", "x"))),
        (["--chief", "t.py", "--help"], ["--chief"], Target("script", ("t.py", "--help"))),
        (["-n", "2", "-m", "pkg.train", "-n", "5"], ["-n", "2"], Target("module", ("pkg.train", "-n", "5"))),
        (["-n", "2", "--", "echo", "-n", "--", "a"], ["-n", "2"], Target("command", ("echo", "-n", "--", "a"))),
        (["--env", "-m", "t.py"], ["--env", "-m"], Target("script", ("t.py",))),
        (["--help"], ["--help"], Target("script", ())),
        (["-n"], ["-n"], Target("script", ())),
    ],
)
def test_split(arguments: list[str], own: list[str], target: Target) -> None:
    assert split(arguments, WITH_VALUE) == (own, target)


def test_script_runs_in_this_python(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert Target("script", (str(script), "-x", "a b")).command() == (sys.executable, "-u", str(script), "-x", "a b")


def test_a_folder_runs_if_python_can_run_it(tmp_path) -> None:
    for kind in ("script", "command"):
        target = Target(kind, (f"{tmp_path}.py" if kind == "command" else str(tmp_path),))
        (tmp_path.parent / f"{tmp_path.name}.py").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r": a folder without __main__.py\. Give the path of a Python file, -m"):
            target.command()
    (tmp_path / "__main__.py").touch()
    assert Target("script", (str(tmp_path),)).command() == (sys.executable, "-u", str(tmp_path))


def test_module_runs_in_this_python() -> None:
    assert Target("module", ("pkg.train", "-x")).command() == (sys.executable, "-u", "-m", "pkg.train", "-x")


def test_command_runs_as_it_is() -> None:
    assert Target("command", ("sh", "-c", "exit 3")).command() == ("sh", "-c", "exit 3")


def test_python_file_after_dashes_runs_in_this_python(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert Target("command", (str(script),)).command() == (sys.executable, "-u", str(script))


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Target("script", ()), ["nothing to run", "tfdist run -n 2 train.py"]),
        (Target("script", ("nowhere.py",)), ["nowhere.py: no such script in ", "-m MODULE", "-- COMMAND"]),
        (Target("command", ("no-such-command",)), ["no-such-command: no such command on the PATH", "after --"]),
        (Target("command", ("nowhere.py",)), ["nowhere.py: no such script in "]),
    ],
)
def test_nothing_to_run(target: Target, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        target.command()
    for word in words:
        assert word in str(caught.value)
