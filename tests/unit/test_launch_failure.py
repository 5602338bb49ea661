from __future__ import annotations

import signal

import pytest

from tfdist.launch.failure import Failure, choose, exit_code, signal_name

UNAVAILABLE = Failure(
    "worker 0",
    1,
    (
        "Traceback (most recent call last):",
        "tensorflow.python.framework.errors_impl.UnavailableError: {{function_node f}} Collective ops is aborted by:",
        "Additional GRPC error information from remote target /job:worker/replica:0/task:1: [Op:f]",
    ),
)
OWN = Failure("worker 1", 1, ("Traceback (most recent call last):", "ValueError: no such column"))
SILENT = Failure("worker 2", 3)
KILLED = Failure("worker 3", -signal.SIGKILL)


@pytest.mark.parametrize(
    ("failures", "chosen"),
    [
        ([OWN], OWN),
        ([OWN, UNAVAILABLE], OWN),
        ([UNAVAILABLE, OWN], OWN),
        ([UNAVAILABLE, SILENT], SILENT),
        ([UNAVAILABLE, KILLED], KILLED),
        ([SILENT, OWN], SILENT),
        ([UNAVAILABLE, UNAVAILABLE], UNAVAILABLE),
    ],
)
def test_choice(failures: list[Failure], chosen: Failure) -> None:
    assert choose(failures) is chosen


@pytest.mark.parametrize(
    ("line", "consequence"),
    [
        ("tensorflow.python.framework.errors_impl.AbortedError: x", True),
        ("UnavailableError: x", True),
        ("errors_impl.CancelledError", True),
        ("tensorflow.python.framework.errors_impl.InvalidArgumentError: x", False),
        ("my.UnavailableErrorInWords", False),
        ("the server said UnavailableError: gone", False),
        ("KeyboardInterrupt", False),
    ],
)
def test_consequence(line: str, consequence: bool) -> None:
    assert Failure("worker 0", 1, ("before", line, "after")).is_consequence is consequence


def test_the_last_exception_counts() -> None:
    tail = (
        "UnavailableError: first",
        "During handling of the above exception, another exception occurred:",
        "KeyError: 1",
    )
    assert not Failure("worker 0", 1, tail).is_consequence
    assert Failure("worker 0", 1, tail[::-1]).is_consequence


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        (SILENT, 3, "worker 2 failed with exit code 3"),
        (Failure("chief 0", -signal.SIGSEGV), 139, "chief 0 was killed by SIGSEGV (exit code 139)"),
        (KILLED, 137, "worker 3 was killed by SIGKILL (exit code 137; the kernel does that when memory runs out)"),
    ],
)
def test_wording(failure: Failure, code: int, text: str) -> None:
    assert failure.exit_code == code
    assert str(failure) == text


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        (OWN, "worker 1 failed with exit code 1 (ValueError: no such column)"),
        (SILENT, "worker 2 failed with exit code 3"),
        (KILLED, "worker 3 was killed by SIGKILL"),
        (Failure("worker 1", 124, hang="stands still at step 3"), "worker 1 stands still at step 3"),
        (
            Failure("worker 1", 1, ("ValueError: " + "x" * 500,)),
            f"worker 1 failed with exit code 1 (ValueError: {'x' * 148}…)",
        ),
    ],
)
def test_cause(failure: Failure, text: str) -> None:
    assert failure.cause == text


def test_a_hang_is_reported_as_one() -> None:
    failure = Failure("worker 1", 124, ("a",), "log", hang="stands still at step 3")
    assert failure.report().startswith("worker 1 stands still at step 3; its last lines:\n  a\n")
    assert failure.exit_code == 124


def test_report() -> None:
    assert Failure("worker 1", 3, ("a", "b"), "logs/worker-1.log").report() == (
        "worker 1 failed with exit code 3; its last lines:\n  a\n  b\ntfdist: its complete log: logs/worker-1.log"
    )
    long = Failure("worker 1", 3, tuple(f"line {number}" for number in range(50))).report()
    assert "last lines:\n  line 30\n" in long
    assert "(it printed nothing)" in SILENT.report()


def test_codes_and_names() -> None:
    assert [exit_code(status) for status in (0, 7, -2, -15)] == [0, 7, 130, 143]
    assert signal_name(15) == "SIGTERM"
    assert signal_name(99) == "signal 99"
