"""What may follow on a command line, and where the shells are told of it. tests/launcher/test_completion.py types."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from tfdist.jobs.record import Records
from tfdist.jobs.request import Request
from tfdist.launcher import completion
from tfdist.launcher.arguments import Target
from tfdist.launcher.command import main
from tfdist.launcher.completion.installation import install, place_of, script_of, shell_of_user, wanted_shell

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
        ("tfdist --install-completion ", ["bash", "zsh", "fish", "auto"]),
        ("tfdist --version --inst", ["--install-completion"]),
        ("tfdist horovod b", ["build"]),
        ("tfdist run --transp", ["--transport"]),
        ("tfdist run --output ", ["chief", "all"]),
        ("tfdist run --output=c", ["chief"]),
        ("tfdist run --log-dir ", FOLDERS),
        ("tfdist run --log-dir logs ", FILES),
        ("tfdist run ", FILES),
        ("tfdist run -n 2 exam", FILES),
        ("tfdist run train.py --output ", FILES),
        ("tfdist run train.py --outp", FILES),
        ("tfdist run -m ", FILES),
        ("tfdist run -- ", FILES),
        ("tfdist run -n ", []),
        ("tfdist submit --scheduler k", ["kubernetes"]),
        ("tfdist submit train.py ", FILES),
        ("tfdist drill --keep", ["--keep-going"]),
        ("tfdist plan --hardware h", ["h100-nvlink"]),
        ("tfdist plan --hardware ./m", FILES),
        ("tfdist plan --plot ", FILES),
    ],
)
def test_what_follows(line: str, expected: list[str]) -> None:
    assert what_follows(line) == expected


def test_every_command_is_offered() -> None:
    assert what_follows("tfdist ") == main.list_commands(click.Context(main))


def test_jobs_are_offered_by_their_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFDIST_JOBS_DIR", str(tmp_path))
    assert (what_follows("tfdist logs "), what_follows("tfdist monitor ")) == ([], FOLDERS)
    request = Request("slurm", Target("script", ("train.py",)))
    for job in ("17", "18", "21"):
        Records(tmp_path).add(request, tmp_path, job, job=job, cluster="", grace=60)
    assert what_follows("tfdist logs slurm-1") == ["slurm-17", "slurm-18"]
    assert what_follows("tfdist status ") == ["slurm-17", "slurm-18", "slurm-21"]
    assert (what_follows("tfdist monitor slurm-2"), what_follows("tfdist monitor logs")) == (["slurm-21"], FOLDERS)


def test_jobs_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs").write_text("no folder")
    monkeypatch.setenv("TFDIST_JOBS_DIR", str(tmp_path / "jobs"))
    assert what_follows("tfdist logs ") == []


def test_completion_runs_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert "run" in what_follows("tfdist --version ")
    assert capsys.readouterr().out == ""


# --- Installation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_installs_below_the_home_folder(shell: str, tmp_path: Path) -> None:
    lines = install(shell, main, {}, tmp_path)
    script, startup = place_of(shell, {}, tmp_path)
    assert script.read_text() == script_of(shell, main)
    assert lines[0] == f"{script}: written"
    if startup is not None:
        assert startup.read_text().count(str(script)) == 2
        assert lines[1].startswith(f"{startup}: added the line: [ ! -f {script} ]")


def test_keeps_what_the_file_of_the_shell_has(tmp_path: Path) -> None:
    dotfiles = tmp_path / "dotfiles"
    dotfiles.write_bytes(b"alias a=b # \xff")  # neither UTF-8 nor a newline at its end
    (tmp_path / ".bashrc").symlink_to(dotfiles)
    install("bash", main, {}, tmp_path)
    first, second = dotfiles.read_bytes().splitlines()
    assert first == b"alias a=b # \xff"
    install("bash", main, {"XDG_DATA_HOME": str(tmp_path / "my data")}, tmp_path)
    assert (tmp_path / ".bashrc").is_symlink()
    moved = second.replace(
        f"{tmp_path}/.local/share/tfdist/completion.bash".encode(), b"'%b/my data/tfdist/completion.bash'"
    )
    assert dotfiles.read_bytes() == b"%b\n%b\n" % (first, moved.replace(b"%b", bytes(tmp_path)))


def test_places_follow_the_environment(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": "/data", "XDG_CONFIG_HOME": "/config", "ZDOTDIR": "/z"}
    assert place_of("zsh", env, tmp_path) == (Path("/data/tfdist/completion.zsh"), Path("/z/.zshrc"))
    assert place_of("fish", env, tmp_path) == (Path("/config/fish/completions/tfdist.fish"), None)


def test_the_command_says_what_it_did(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["--install-completion", "fish"], env={"HOME": str(tmp_path), "XDG_CONFIG_HOME": ""}
    )
    script = tmp_path / ".config/fish/completions/tfdist.fish"
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        f"tfdist: {script}: written",
        "tfdist: It works in every fish that starts from now on.",
    ]
    shown = CliRunner().invoke(main, ["--show-completion", "fish"])
    assert (shown.exit_code, shown.output) == (0, script.read_text())


def test_a_home_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / ".local").write_text("no folder")
    result = CliRunner().invoke(
        main, ["--install-completion", "bash"], env={"HOME": str(tmp_path), "XDG_DATA_HOME": ""}
    )
    assert result.exit_code == 1
    assert str(tmp_path / ".local") in result.output
    assert os.listdir(tmp_path) == [".local"]


def test_which_shell() -> None:
    assert shell_of_user({"SHELL": "/bin/zsh"}, ["python", "-bash", "sshd"]) == "bash"
    assert shell_of_user({"SHELL": "/usr/bin/zsh"}, ["tmux"]) == "zsh"
    assert shell_of_user({}, ["pwsh"]) is None
    assert wanted_shell("fish") == "fish"
    result = CliRunner().invoke(main, ["--install-completion", "tcsh"])
    assert result.exit_code == 2
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in result.output


def test_an_unknown_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfdist.launcher.completion.installation.processes_above", lambda: ["systemd"])
    monkeypatch.setenv("SHELL", "/bin/ksh")
    result = CliRunner().invoke(main, ["--install-completion"])
    assert result.exit_code == 2
    assert "which shell? Expected one of bash, zsh, fish" in result.output
