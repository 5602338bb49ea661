"""Which hosts are named on the command line and in host files."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.launcher.hosts.places import ListedHost, parse_hostfile, parse_hosts
from tfdist.launcher.hosts.run import _listed
from tfdist.launcher.plan import PlanError


def pairs(hosts: list[ListedHost]) -> list[tuple[str, int | None]]:
    return [(host.name, host.slots) for host in hosts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [("a", None)]),
        ("a:8,b:4", [("a", 8), ("b", 4)]),
        (" a:8 , me@b.example.org , ", [("a", 8), ("me@b.example.org", None)]),
        (
            "10.0.0.1:2,[2001:db8::1]:4,me@[fe80::1%eth0]",
            [("10.0.0.1", 2), ("2001:db8::1", 4), ("me@fe80::1%eth0", None)],
        ),
        # As mpirun has it: each mention is a place for a process.
        ("a,b,a", [("a", 2), ("b", None)]),
        ("a:2,b:1,a:3", [("a", 5), ("b", 1)]),
    ],
)
def test_hosts(text: str, expected: list) -> None:
    assert pairs(parse_hosts(text)) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it names no host"),
        (",", "it names no host"),
        ("a:", "'a:' is no host. Expected: the name of a host as ssh takes it"),
        ("a:x", "'a:x' is no host"),
        ("a:0", "'a:0' has no process. Expected: at least 1, or leave the host out"),
        ("2001:db8::1", "is no host"),
        ("a:2,a", "a stands there with and without a number of processes. Expected: once, such as a:8"),
        # ssh would take these for options, or a shell for something else.
        ("-oProxyCommand=id", "is no host"),
        ("me@-x", "is no host"),
        ("a b", "is no host"),
        ("a'b", "is no host"),
        ("a;b", "is no host. Expected: the name of a host as ssh takes it, of letters, digits and _ . - %,"),
        ("a$(id)", "is no host"),
        ("a`id`", "is no host"),
        ("a\0b", "is no host"),
        ("a\x1b[2Jb", r"'a\x1b[2Jb' is no host"),
        ("me;id@a", "is no host"),
        ("a@b@c", "is no host"),
    ],
)
def test_no_hosts(text: str, words: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_hosts(text)
    assert words in str(raised.value) and str(raised.value).startswith("--hosts")


def test_a_hostfile_of_each_kind() -> None:
    text = """
    # Open MPI and DeepSpeed
    a slots=8
    b  slots = 4 max_slots=4   # a comment
    c\tslots=2
    c2\tslots=2 max_slots=4
    c3 \t slots = 3
    # MPICH
    d:3
    me@e
    # $PBS_NODEFILE
    f
    f
    """
    expected = [("a", 8), ("b", 4), ("c", 2), ("c2", 2), ("c3", 3), ("d", 3), ("me@e", None), ("f", 2)]
    assert pairs(parse_hostfile(text, "hosts.txt")) == expected


@pytest.mark.parametrize("line", ["a 8", "a:2 slots=4", "a slots=x", "a slots=2 b", "a cpu=3", "a;b c", "- a"])
def test_a_line_that_is_no_host(line: str) -> None:
    with pytest.raises(PlanError) as raised:
        parse_hostfile(f"first\n{line}\n", "hosts.txt")
    assert str(raised.value).startswith(f"--hostfile hosts.txt, line 2: {line!r} is no host")


def test_a_hostfile_of_an_editor_for_windows(tmp_path) -> None:
    (tmp_path / "hosts.txt").write_bytes("a slots=2\r\nb\r\n".encode("utf-8-sig"))
    assert pairs(_listed(None, str(tmp_path / "hosts.txt"))) == [("a", 2), ("b", None)]
    (tmp_path / "hosts.txt").write_bytes("a\n".encode("utf-16"))
    with pytest.raises(PlanError, match="is no host"):
        _listed(None, str(tmp_path / "hosts.txt"))


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    for parse in (parse_hosts, lambda text: parse_hostfile(text, "hosts.txt")):
        try:
            found = parse(text)
        except PlanError:
            continue
        assert found and len({host.name for host in found}) == len(found)
        for host in found:
            assert not host.name.startswith("-") and not set(host.name) & set(" \t\n;$`'\"\\|&<>()*?~#!\0\x1b")
            assert host.slots is None or host.slots > 0
