from __future__ import annotations

import signal

from tfdist.launcher.guardian import remaining_groups
from tfdist.launcher.operating_system import SignalInbox


def test_signals_wait_in_order_until_taken() -> None:
    with SignalInbox() as inbox:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGWINCH):
            signal.raise_signal(number)
        assert inbox.take() == [signal.SIGTERM, signal.SIGINT, signal.SIGWINCH]
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
