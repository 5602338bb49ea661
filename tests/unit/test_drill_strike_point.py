from __future__ import annotations

import pytest

from tfdist.launch.drill.faults import FAULTS
from tfdist.launch.drill.strike_point import FEWEST_SAVES, Rhythm, rhythm


def saved(*moments: tuple[int, float]) -> list[dict]:
    return [{"event": "start", "time": 0.0}, *({"event": "saved", "step": s, "time": t} for s, t in moments)]


def test_the_rhythm_of_a_run() -> None:
    events = saved((10, 5.0), (20, 6.0), (30, 9.0), (40, 10.5), (40, 10.6))
    assert rhythm(events) == Rhythm(saves=3, steps=40, pause=1.5, longest_pause=3.0)


def test_a_run_that_only_saves_at_its_end() -> None:
    assert rhythm(saved((40, 10.0), (40, 10.1))) == Rhythm(saves=0, steps=40, pause=0.0, longest_pause=0.0)
    assert rhythm(saved()) == Rhythm(saves=0, steps=0, pause=0.0, longest_pause=0.0)


@pytest.mark.parametrize(
    ("saves", "before", "left", "expected"),
    [(10, 1, 1, 4), (11, 1, 1, 5), (3, 1, 1, 2), (3, 2, 1, 2), (3, 1, 2, 1), (4, 1, 2, 2), (100, 1, 2, 40)],
)
def test_the_backup_after_which_to_strike(saves: int, before: int, left: int, expected: int) -> None:
    assert Rhythm(saves, 100, 1.0, 1.0).strike_after(before, left) == expected


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_fits_into_the_shortest_run_that_is_allowed(fault) -> None:
    after = Rhythm(FEWEST_SAVES, 100, 1.0, 1.0).strike_after(fault.saves_before, fault.saves_left)
    assert fault.saves_before <= after <= FEWEST_SAVES - fault.saves_left


@pytest.mark.parametrize(("longest", "expected"), [(0.1, 8.0), (4.0, 12.0), (11.0, None)])
def test_the_hang_timeout(longest: float, expected: float | None) -> None:
    assert Rhythm(5, 100, 0.1, longest).hang_timeout == expected
