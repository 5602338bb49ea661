"""`tfdist run --hosts` with real agents, as users start it; ssh, and that there are several hosts, is pretended."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import tfdist
from tests.launcher.conftest import wait_until
from tests.launcher.training import events, of_kind, program
from tfdist.launcher.command import main

SECRET = "s3cret $(id) 'quoted'"
SAYS = """
import hashlib
token = os.environ["TFDIST_TOKEN"]
print(json.dumps([os.environ.get("FAKE_HOST"), hashlib.sha256(token.encode()).hexdigest(), len(token),
    os.environ.get("KEY"), os.environ.get("AWS_SECRET_ACCESS_KEY"), os.environ.get("KERAS_OWN"), sys.argv[1:],
    sys.stdin.read(), os.getcwd()]))
Path(f"cmdline-{index}").write_text("".join(text(p) for p in Path("/proc").glob("[0-9]*/cmdline")))
"""
TEXT = """
def text(path):
    try: return path.read_text(errors="replace")
    except OSError: return ""  # it has ended, or belongs to somebody else
"""
# The last worker of the first life dies; those of the next one take the training up again.
FAILS_ONCE = """
workers = len(config["cluster"]["worker"])
if restart == 0:
    train(10)
    if index == workers - 1: {how}
    wait()
train(20, resumed=8)
print("workers", workers, os.environ.get("FAKE_HOST"))
"""
DEADLINE = 60.0


def fails_once(how: str) -> str:
    return program(FAILS_ONCE.replace("{how}", how))


def test_what_a_process_gets_and_what_others_can_see(launch_on, ssh, tmp_path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    env = {"AWS_SECRET_ACCESS_KEY": "of a cloud", "KERAS_OWN": "travels"}
    options = ("--output", "all", "--env", f"KEY={SECRET}")
    words = ("script.py", "a b", "$HOME")
    started = launch_on("one:2,two", TEXT + SAYS, *options, arguments=words, env=env, folder=folder)
    result = started.finish(DEADLINE)
    assert result.code == 0, result.err
    said = {line.split("]")[0][1:]: json.loads(line.partition("] ")[2]) for line in result.out.splitlines()}
    assert [said[f"worker {index}"][0] for index in range(3)] == ["one", "one", "two"]
    first = said["worker 0"]
    assert first[2] == 32 and first[3:] == [SECRET, None, "travels", ["a b", "$HOME"], "", str(folder)]
    assert said["worker 1"][1:] == said["worker 2"][1:] == first[1:]
    # Of all processes of this machine, the launcher has it in its own options; nobody else.
    seen = "".join((folder / f"cmdline-{index}").read_text() for index in range(3))
    launcher = "\0".join(started.popen.args)
    assert launcher in seen, "the test sees no command lines"
    assert SECRET not in seen.replace(launcher, "") + ssh.command_lines and "TFDIST_TOKEN" not in ssh.command_lines
    assert "BatchMode=yes" in ssh.command_lines and "my config" in ssh.command_lines
    assert {path.name for path in folder.glob("tfdist-logs/*/*")} == {
        *(f"worker-{index}.log" for index in range(3)),
        "events.jsonl",
    }
    assert json.loads(started.log("worker-2")) == said["worker 2"]
    assert (
        "tfdist: 3 workers on 2 hosts (one: worker 0 and 1; two: worker 2); complete logs in tfdist-logs/" in result.err
    )
    assert "tfdist: one and two are the same machine" in result.err
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_token_of_the_users_is_kept(launch_on) -> None:
    script = "print(os.environ['TFDIST_TOKEN'])"
    result = launch_on("one,two", script, "--output", "all", env={"TFDIST_TOKEN": "mine"}).finish(DEADLINE)
    assert sorted(result.out.splitlines()) == ["[worker 0] mine", "[worker 1] mine"], result.err


def test_this_machine_needs_no_ssh(launch_on, ssh) -> None:
    """Also where the user has come here by ssh, which says nothing about the network of the hosts."""
    env = {"SSH_CONNECTION": "192.0.2.1 1 192.0.2.2 22"}
    script = "print(os.environ.get('FAKE_HOST'), config['cluster'])"
    result = launch_on("localhost:2", script, "--output", "all", env=env).finish(DEADLINE)
    assert result.code == 0 and not (ssh.folder / "command-lines").exists()
    assert re.fullmatch(r"(\[worker \d\] None \{'worker': \['127.0.0.1:\d+', '127.0.0.1:\d+'\]\}\n){2}", result.out)


@pytest.mark.nightly
def test_a_hostfile_and_fewer_processes_than_places(launch_on, tmp_path) -> None:
    (tmp_path / "hosts.txt").write_text("# ours\none slots=2\ntwo slots=2\nthree slots=2\n")
    script = "print(index, os.environ['FAKE_HOST'])"
    result = launch_on("", script, "--hostfile", "hosts.txt", "-n", "3", "--output", "all").finish(DEADLINE)
    assert sorted(result.out.splitlines()) == ["[worker 0] 0 one", "[worker 1] 1 one", "[worker 2] 2 two"], result.err


def test_a_failure_names_the_host(launch_on) -> None:
    script = "if index == 1: raise ValueError('no such column')\ntime.sleep(1000)"
    started = launch_on("one,two", script)
    result = started.finish(DEADLINE)
    assert result.code == 1
    assert "tfdist: worker 1 on two failed with exit code 1; its last lines:\n" in result.err
    assert "  ValueError: no such column\ntfdist: its complete log: tfdist-logs/" in result.err
    started.assert_nothing_is_left()


def test_a_killed_worker_is_started_again_with_all_others(launch_on, tmp_path) -> None:
    started = launch_on("one,two", fails_once("kill()"))
    result = started.finish(DEADLINE)
    assert (result.code, result.out) == (0, "[worker 0] workers 2 one\n"), result.err
    assert re.search(
        r"\ntfdist: worker 1 on two was killed by SIGKILL at step 10; restart 1 of 3\n"
        r"tfdist: restart 1 of 3: training again after \d+\.\d s, "
        r"2 steps redone\n$",
        result.err,
    ), result.err
    kinds = [event["event"] for event in events(tmp_path)]
    assert kinds == ["start", "failure", "restart", "start", "training-again", "complete"]
    assert started.log("worker-1").startswith("--- restart 1 ---\nworkers 2 two\n")
    started.assert_nothing_is_left()


def test_nothing_outlives_a_launcher_that_is_killed(launch_on) -> None:
    script = """
        helper = subprocess.Popen(["setsid", "sleep", "1000"])  # it has left the group
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(f"ready-{index}").touch()
        time.sleep(1000)
        """
    started = launch_on("one:2,localhost", script)
    started.wait_for_file("ready-0", "ready-1", "ready-2", deadline=DEADLINE)
    started.popen.kill()
    started.assert_nothing_is_left()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)],
    ids=["SIGTERM", "SIGINT"],
)
def test_signals_reach_all_processes(launch_on, number: signal.Signals) -> None:
    script = f"""
        def stop(*_):
            print("saved", flush=True)
            sys.exit(77)
        signal.signal({int(number)}, stop)
        Path(f"ready-{{index}}").touch()
        time.sleep(1000)
        """
    started = launch_on("one,two", script, "--grace", "40")
    started.wait_for_file("ready-0", "ready-1", deadline=DEADLINE)
    started.popen.send_signal(number)
    result = started.finish(DEADLINE)
    assert (result.code, result.out) == (77, "[worker 0] saved\n"), result.err
    assert f"tfdist: {number.name} received and passed on to 2 processes (SIGKILL in 40 s" in result.err
    assert started.log("worker-1") == "saved\n"
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_lost_agent_is_a_lost_host(launch_on, ssh, tmp_path) -> None:
    """What it has started ends with it; the run goes on with another one."""
    started = launch_on("one,two", fails_once("wait()"))
    ssh.wait_for_training("two", DEADLINE)
    ssh.lose("two")
    result = started.finish(DEADLINE)
    assert (result.code, result.out) == (0, "[worker 0] workers 2 one\n"), result.err
    lost = (
        r"tfdist: host two is lost: its agent has ended with exit code -9; it ran worker 1 at step \d+; restart 1 of 3"
    )
    assert re.search(f"{lost}\n(.*\n)*tfdist: restart 1 of 3: training again after", result.err), result.err
    (failure,) = of_kind(tmp_path, "failure")
    assert (failure["kind"], failure["exit_code"], failure["task"]) == ("host", 255, "worker 1")
    started.assert_nothing_is_left()


def test_a_host_that_comes_back_is_waited_for(launch_on, ssh) -> None:
    started = launch_on("one,two", fails_once("wait()"))
    ssh.wait_for_training("two", DEADLINE)
    ssh.set_down("two")
    ssh.lose("two")
    seen = ssh.folder / "command-lines"
    before = seen.read_text().count("exec /bin/sh")
    wait_until(lambda: seen.read_text().count("exec /bin/sh") >= before + 3, DEADLINE, "another try")
    ssh.set_down("two", False)
    result = started.finish(DEADLINE)
    assert (result.code, result.out) == (0, "[worker 0] workers 2 one\n"), result.err
    lost = (
        r"tfdist: host two is lost: its agent has ended with exit code -9; it ran worker 1 at step \d+; restart 1 of 3"
    )
    said = r"ssh says: ssh: connect to host two port 22: No route to host\. Expected: `.* two true` works"
    assert re.search(
        f"{lost}\ntfdist: restart 1 of 3: host two cannot be reached: .*{said}.*; trying again for 600 s\n", result.err
    ), result.err
    assert re.search(f"{lost}\n(.*\n)*tfdist: restart 1 of 3: training again after", result.err), result.err


@pytest.mark.nightly
def test_a_host_that_stays_away_ends_the_run(launch_on, ssh, tmp_path) -> None:
    started = launch_on("one,two", fails_once("wait()"), "--start-timeout", "10")
    ssh.wait_for_training("two", DEADLINE)
    ssh.set_down("two")
    ssh.lose("two")
    result = started.finish(DEADLINE)
    assert result.code == 255
    assert result.err.splitlines()[-1].startswith("tfdist: host two cannot be reached: "), result.err
    assert [event["event"] for event in events(tmp_path)] == ["start", "failure", "restart", "gave-up"]
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_host_that_comes_back_is_taken_in_again(launch_on, ssh, tmp_path) -> None:
    script = program("""
        signal.signal(signal.SIGTERM, lambda *_: os._exit(77))
        train(5, resumed=restart * 4)
        Path(f"trains-{restart}").touch()
        if restart < 2: train(100_000, resumed=restart * 4)
        print("workers", len(config["cluster"]["worker"]))
    """)
    started = launch_on("one,two", script, "-n", "1:2", "--regrow-after", "1")
    ssh.wait_for_training("two", DEADLINE)
    ssh.set_down("two")
    ssh.lose("two")
    started.wait_for_file("trains-1", deadline=DEADLINE)
    seen = ssh.folder / "command-lines"
    before = seen.read_text().count("exec /bin/sh")
    wait_until(lambda: seen.read_text().count("exec /bin/sh") >= before + 2, DEADLINE, "another look")
    ssh.set_down("two", False)
    result = started.finish(DEADLINE)
    assert (result.code, result.out) == (0, "[worker 0] workers 2\n"), result.err
    assert "tfdist: there is room for 2 workers; saving with 1 worker to start again\n" in result.err
    assert [event["workers"] for event in of_kind(tmp_path, "start")] == [2, 1, 2]
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_signal_while_a_host_is_waited_for(launch_on, ssh) -> None:
    started = launch_on("one,two", fails_once("wait()"))
    ssh.wait_for_training("two", DEADLINE)
    ssh.set_down("two")
    ssh.lose("two")
    seen = ssh.folder / "command-lines"
    before = seen.read_text().count("exec /bin/sh")
    wait_until(lambda: seen.read_text().count("exec /bin/sh") >= before + 3, DEADLINE, "another try")
    started.popen.send_signal(signal.SIGTERM)
    result = started.finish(DEADLINE)
    assert result.code == 143 and "tfdist: SIGTERM received: not started\n" in result.err, result.err
    started.assert_nothing_is_left()


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_before_the_hosts_are_reached(launch_on, ssh, tmp_path, number: signal.Signals) -> None:
    ssh.set_profile("two", "touch waits; exec sleep 1000")
    started = launch_on("one,two", "Path('started').touch()")
    started.wait_for_file("waits", deadline=DEADLINE)
    started.popen.send_signal(number)
    result = started.finish(DEADLINE)
    assert (result.code, result.err) == (128 + number, f"tfdist: {number.name} received: not started\n")
    assert not (tmp_path / "started").exists() and not list(tmp_path.glob("tfdist-logs/*"))
    started.assert_nothing_is_left()


@pytest.mark.nightly
def test_a_folder_of_logs_that_is_deleted(launch_on, tmp_path) -> None:
    delete = "import shutil; shutil.rmtree(os.environ['TFDIST_LOG_DIR']); kill()"
    result = launch_on("one,two", fails_once(delete)).finish(DEADLINE)
    assert (result.code, result.out) == (0, "[worker 0] workers 2 one\n"), result.err
    assert len(list(tmp_path.glob("tfdist-logs/*/worker-*.log"))) == 2
    assert not list(tmp_path.glob("tfdist-logs/*/.host-*"))


def test_all_hosts_that_cannot_be_reached_are_named(launch_on, ssh, tmp_path) -> None:
    ssh.set_down("two")
    ssh.set_down("three")
    started = launch_on("one,two,three", "Path('started').touch()")
    result = started.finish(DEADLINE)
    assert (result.code, result.out) == (1, "")
    assert [line.split(":")[1] for line in result.err.splitlines()] == [
        " host two cannot be reached",
        " host three cannot be reached",
    ]
    assert not (tmp_path / "started").exists() and not list(tmp_path.glob("tfdist-logs/*"))
    started.assert_nothing_is_left()


def test_what_shells_print_is_no_matter(launch_on, ssh) -> None:
    """A greeting, much of it, bytes that are no text, and what looks like our own messages."""
    ssh.set_profile("two", 'head -c 300000 /dev/urandom; echo \'J....{"kind": "hello"}\'; echo Welcome >&2')
    result = launch_on("one,two", "print('hello')", "--output", "all").finish(DEADLINE)
    assert result.code == 0 and sorted(result.out.splitlines()) == ["[worker 0] hello", "[worker 1] hello"], result.err


@pytest.mark.nightly
def test_a_shell_that_goes_on_printing_is_named(launch_on, ssh) -> None:
    ssh.set_profile("two", "(until [ -e started ]; do sleep 0.1; done; echo You have new mail) &")
    started = launch_on("one,two", "Path('started').touch(); time.sleep(1000)")
    result = started.finish(DEADLINE)
    assert result.code == 255
    assert "something prints into the connection of host two: b'You have new mail'. Expected: nothing" in result.err
    started.assert_nothing_is_left()


@pytest.mark.nightly
@pytest.mark.parametrize("shell", ["/bin/bash", "/bin/dash", "/bin/tcsh", "/usr/bin/fish", "/bin/zsh"])
def test_the_users_shell_may_be_any(launch_on, ssh, tmp_path, shell: str) -> None:
    if not os.access(shell, os.X_OK):
        pytest.skip(f"no {shell} here")
    folder = tmp_path / "it's $HOME!"
    folder.mkdir()
    ssh.use_shell(shell)
    result = launch_on("one", "print(os.getcwd())", folder=folder).finish(DEADLINE)
    assert (result.code, result.out) == (0, f"[worker 0] {folder}\n"), result.err


@pytest.mark.nightly
def test_a_folder_that_is_not_there(launch_on, ssh, tmp_path) -> None:
    folder = tmp_path / "here only"
    folder.mkdir()
    ssh.set_profile("one", f"mv '{folder}' '{folder} no more'")
    result = launch_on("one", "", folder=folder).finish(DEADLINE)
    assert result.code == 1
    assert f"tfdist: host one has no folder {folder}. Expected: the same folder on all hosts" in result.err


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("python", "words"),
    [
        (
            "/no/such/python",
            "host one has no /no/such/python. Expected: the same Python in the same place on all hosts",
        ),
        ("/bin/false", "host one: its agent has ended with exit code 1: (it printed nothing). Expected: tfdist "),
        ("{without}", "host one: {without} has no tfdist there. Expected: tfdist "),
        ("{other}", "host one has tfdist 0.0.9, and this machine "),
    ],
    ids=["no Python", "not Python", "no tfdist", "another version"],
)
def test_another_python(launch_on, tmp_path, python: str, words: str) -> None:
    source = Path(tfdist.__file__).parent.parent
    paths = {name: tmp_path / name for name in ("without", "other")}
    # The launcher's own tfdist is found there, too, unless somebody hides it.
    lines = {
        "without": "import importlib.util as u; find = u.find_spec; "
        "u.find_spec = lambda name, *more: None if name == 'tfdist' else find(name, *more)",
        "other": f"import sys; sys.path.insert(0, {str(source)!r}); import tfdist; tfdist.__version__ = '0.0.9'",
    }
    for name, path in paths.items():
        (tmp_path / f"site-{name}").mkdir()
        (tmp_path / f"site-{name}" / "sitecustomize.py").write_text(lines[name])
        path.write_text(f"#!/bin/sh\nPYTHONPATH='{tmp_path}/site-{name}' exec {sys.executable} \"$@\"\n")
        path.chmod(0o755)
    names = {name: str(path) for name, path in paths.items()}
    result = launch_on("one", "", "--remote-python", python.format(**names)).finish(DEADLINE)
    assert result.code == 1
    assert words.format(**names) in result.err, result.err


@pytest.mark.nightly
def test_no_such_ssh(launch_on) -> None:
    result = launch_on("one", "", "--ssh", "/no/such/ssh").finish(DEADLINE)
    assert result.code == 1
    assert "tfdist: --ssh /no/such/ssh: No such file or directory. Expected: the client of OpenSSH;" in result.err


@pytest.mark.parametrize(
    ("hosts", "options", "words"),
    [
        ("a", ("--host", "10.0.0.1"), "--host and --hosts: expected only one of them: each host has the address"),
        ("a", ("--hostfile", "x"), "--hosts a and --hostfile x: expected only one of them"),
        ("a:", (), "'a:' is no host"),
        (
            "",
            ("--hostfile", "/no/file"),
            "--hostfile /no/file: No such file or directory. Expected: a file with a host",
        ),
        ("a,b", ("--ps", "1", "-n", "1:2"), "-n 1:2 and --ps 1: expected one number of workers"),
        ("a:2", ("-n", "0"), "--workers 0: expected at least 1"),
        ("a", ("--ssh", "'"), '--ssh "\'": expected a command'),
        ("", ("--remote-python", "x"), "--remote-python: expected --hosts or --hostfile, too"),
        ("", ("--ssh", "x"), "--ssh: expected --hosts or --hostfile, too"),
    ],
)
def test_what_does_not_go_together(tmp_path, monkeypatch, hosts: str, options: tuple[str, ...], words: str) -> None:
    (tmp_path / "script.py").touch()
    monkeypatch.chdir(tmp_path)
    names = ["--hosts", hosts] if hosts else []
    result = CliRunner().invoke(main, ["run", *names, *options, "script.py"])
    assert result.exit_code == 2 and words in result.output, result.output
    assert not (tmp_path / "tfdist-logs").exists()


@pytest.mark.nightly
def test_more_processes_than_places(launch_on, tmp_path) -> None:
    result = launch_on("one:2,two", "", "-n", "4").finish(DEADLINE)
    assert result.code == 2
    assert "-n 4: 4 processes, but --hosts has places for 3 (one:2, two:1). Ask for fewer, or name more" in result.err
    assert not list(tmp_path.glob("tfdist-logs/*"))


@pytest.mark.nightly
def test_a_command_that_a_host_does_not_have(launch_on, ssh, tmp_path) -> None:
    (tmp_path / "tool").write_text("#!/bin/sh\necho hello\n")
    (tmp_path / "tool").chmod(0o755)
    ssh.set_profile("two", "mv tool tool-elsewhere")
    started = launch_on("one,two", "", arguments=("--", "./tool"))
    result = started.finish(DEADLINE)
    assert result.code == 1
    assert re.search(r"tfdist: host (one|two): worker (0|1): .*No such file or directory: './tool'", result.err), (
        result.err
    )
    started.assert_nothing_is_left()


def test_a_lost_host_of_parameter_servers_is_a_restart_of_all(launch_on, ssh, tmp_path) -> None:
    """Its workers cannot be replaced there."""
    script = program(
        """
        if job != "chief":
            wait()
        if restart == 0:
            train(5)
            while True: train(1)
        train(20, resumed=3)
        print("restart", restart, os.environ["FAKE_HOST"])
        """
    )
    started = launch_on("one,two", script, "--ps", "2", "-n", "2")
    ssh.wait_for_training("one", DEADLINE)
    ssh.lose("two")
    result = started.finish(DEADLINE)
    assert (result.code, result.out) == (0, "[chief 0] restart 1 one\n"), result.err
    lost = (
        r"tfdist: host two is lost: its agent has ended with exit code -9; it ran worker 1 at step \d+; restart 1 of 3"
    )
    assert re.search(f"{lost}\n(.*\n)*tfdist: restart 1 of 3: training again after", result.err), result.err
    assert "replacement" not in result.err
    assert [event["event"] for event in events(tmp_path)][:3] == ["start", "failure", "restart"]
    started.assert_nothing_is_left()
