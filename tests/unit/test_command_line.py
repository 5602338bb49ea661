"""The command line of `tfdist run`: what is a mistake, what is run, what may follow, and what the machine has."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from tfdist.cluster.gpus import parse_nvidia_smi, parse_visible_devices, visible_gpus
from tfdist.launcher.arguments import Target, split
from tfdist.launcher.command import main
from tfdist.launcher.guardian import remaining_groups
from tfdist.launcher.operating_system import SignalInbox


def invoke(*arguments: str):
    return CliRunner().invoke(main, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], ["nothing to run", "tfdist run -n 2 train.py"]),
        (["run", "nowhere.py"], ["nowhere.py: no such script in", "-m MODULE", "-- COMMAND"]),
        (["run", "--", "no-such-command"], ["no-such-command: no such command on the PATH", "after --"]),
        (["run", "--", "nowhere.py"], ["nowhere.py: no such script in "]),
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
        (["run", "--cpus-per-worker", "few", "t.py"], ["'few': expected a whole number of at least 1, or auto"]),
        (["run", "--cpus-per-worker", "0", "t.py"], ["'0': expected a whole number of at least 1, or auto"]),
        (["run", "--output", "none", "t.py"], ["'none' is not one of 'chief', 'all'"]),
    ],
)
def test_usage_errors(arguments: list[str], words: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    for word in words:
        assert word in result.output


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


def test_a_folder_runs_if_python_can_run_it(tmp_path) -> None:
    for kind in ("script", "command"):
        target = Target(kind, (f"{tmp_path}.py" if kind == "command" else str(tmp_path),))
        (tmp_path.parent / f"{tmp_path.name}.py").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=r": a folder without __main__.py\. Give the path of a Python file, -m"):
            target.command()
    (tmp_path / "__main__.py").touch()
    assert Target("script", (str(tmp_path),)).command() == (sys.executable, "-u", str(tmp_path))


FILES, FOLDERS = ["<file>"], ["<dir>"]


def what_follows(line: str) -> list[str]:
    """What the Tab key offers at the end of a command line."""
    *words, incomplete = line.split(" ")[1:]
    found = ShellComplete(main, {}, "tfdist", "_TFDIST_COMPLETE").get_completions(words, incomplete)
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tfdist ru", ["run"]),
        ("tfdist s", ["status", "submit"]),
        ("tfdist --ver", ["--version"]),
        ("tfdist horovod b", ["build"]),
        ("tfdist run --transp", ["--transport"]),
        ("tfdist run --output ", ["chief", "all"]),
        ("tfdist run --output=c", ["chief"]),
        ("tfdist run --log-dir ", FOLDERS),
        ("tfdist run --log-dir logs ", FILES),
        ("tfdist run ", FILES),
        ("tfdist run -n 2 exam", FILES),
        ("tfdist run -m ", FILES),
        ("tfdist run -- ", FILES),
        ("tfdist run -n ", []),
        ("tfdist submit --scheduler k", ["kubernetes"]),
        ("tfdist submit train.py ", FILES),
        ("tfdist drill --keep", ["--keep-going"]),
        ("tfdist plan --save ", FILES),
    ],
)
def test_what_follows(line: str, expected: list[str]) -> None:
    assert what_follows(line) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("-1", ()),
        ("0", ("0",)),
        ("0, 2", ("0", "2")),
        ("1,-1,2", ("1",)),
        ("GPU-8932,GPU-1", ("GPU-8932", "GPU-1")),
    ],
)
def test_visible_devices(text: str, expected: tuple[str, ...]) -> None:
    assert parse_visible_devices(text) == expected
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": text, "PATH": "/nowhere"}) == expected


def test_slices_take_the_place_of_their_gpu() -> None:
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n"
        "  MIG 3g.71gb     Device  0: (UUID: MIG-11)\n"
        "  MIG 3g.71gb     Device  1: (UUID: MIG-22)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-bb)\n"
    )
    assert parse_nvidia_smi(listing) == ("MIG-11", "MIG-22", "1")


def test_nvidia_smi_is_asked(tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text('#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: Some (UUID: GPU-x)"\n')
    command.chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) == ("0",)


def test_signals_wait_in_order_until_taken() -> None:
    with SignalInbox() as inbox:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert inbox.take() == [signal.SIGTERM, signal.SIGINT]
        assert inbox.take() == []


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with SignalInbox():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_hangup_stays_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with SignalInbox() as inbox:
            signal.raise_signal(signal.SIGHUP)
            assert inbox.take() == []
    finally:
        signal.signal(signal.SIGHUP, before)


def test_groups_left_to_the_guardian() -> None:
    assert remaining_groups([]) == {}
    assert remaining_groups(["+10 a\n", "+11 a\n", "-10\n", "+12 \n"]) == {11: "a", 12: ""}
    assert remaining_groups(["-5\n", "+5 b\n"]) == {5: "b"}
