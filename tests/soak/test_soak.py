"""A short soak, and the faults that a seed draws."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.plan import AT_ANY_TIME, WEIGHTS, strikes

DEADLINE = 540


def test_a_seed_has_always_the_same_faults():
    assert list(itertools.islice(strikes(5), 50)) == list(itertools.islice(strikes(5), 50))
    assert list(itertools.islice(strikes(5), 50)) != list(itertools.islice(strikes(6), 50))


def test_an_hour_has_every_kind_of_fault():
    hour = list(itertools.islice(strikes(1), 200))
    assert {strike.kind for strike in hour} == set(WEIGHTS)
    assert {strike.kind for strike in hour if strike.early} <= set(AT_ANY_TIME)
    assert 10 < sum(strike.early for strike in hour) < 50


def test_without_a_disk_of_its_own_none_is_filled():
    assert "disk-full" not in {strike.kind for strike in itertools.islice(strikes(1, can_fill=False), 200)}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.timeout(600)
class TestSoak:
    def test_a_short_one_ends_as_if_there_had_been_no_faults(self):
        code, said = soak("--seconds", "75", "--pause", "1", "--seed", "7")
        assert code == 0
        assert re.search(r"^identical: [1-9]\d* faults", said, re.MULTILINE)

    def test_a_training_that_forgets_is_found(self, tmp_path: Path):
        """Negative control."""
        (tmp_path / "forget").touch()
        code, said = soak("--seconds", "0", "--seed", "7", "--folder", str(tmp_path))
        assert code == 1
        assert "failed: the end differs from that of an undisturbed run: History.history.loss[0]: " in said
        assert "dense/kernel: 1536 of 1536 values differ" in said
        assert "again: python -m tests.soak --seed 7 --seconds 0 --pause 18" in said


def soak(*options: str) -> tuple[int, str]:
    """The exit code of a soak, and what it has printed."""
    words = [sys.executable, "-m", "tests.soak", *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=DEADLINE)
    finally:
        # SIGTERM has it end what it has started, and so has its guardian if it is killed.
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
    print(said)
    return process.returncode, said
