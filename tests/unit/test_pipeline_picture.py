"""Pictures of pipelined steps."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tfdist.strategies.pipeline.schedule import gpipe, interleaved, one_f_one_b
from tfdist.strategies.pipeline.timeline import Interval, save_picture, simulate


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"save_picture draws with matplotlib.*: pip install 'matplotlib>=3.7'$"):
        save_picture(tmp_path / "step.png", None, steps())
    assert not (tmp_path / "step.png").exists()


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Saves a picture as SVG, and gives the texts in it."""
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")

    def save(*arguments, **keywords) -> list[str]:
        save_picture(tmp_path / "step.svg", *arguments, **keywords)
        return re.findall(r"<text [^>]*>([^<]*)</text>", (tmp_path / "step.svg").read_text())

    return save


def steps(scale: float = 0.001) -> list[Interval]:
    return simulate(gpipe(2, 3), [scale, scale], [2 * scale, 2 * scale])


def test_panels_tell_time_idle_share_and_speed_up(texts) -> None:
    found = texts(steps(0.01), steps(), title="a small step")
    titles = [text for text in found if "idle" in text]
    assert titles == [
        "measured: 120 ms, 25.0% idle, speed-up 1.50",
        "predicted: 12 ms, 25.0% idle, speed-up 1.50",
    ]
    assert "a small step" in found
    assert (found.count("forward"), found.count("backward")) == (1, 1)
    assert (found.count("ms"), found.count("stage 0"), found.count("stage 1"), found.count("stage 2")) == (2, 2, 2, 0)


@pytest.mark.parametrize("measured", [None, []])
def test_without_measurements_there_is_one_panel(texts, measured) -> None:
    assert [text for text in texts(measured, steps()) if "idle" in text] == [
        "predicted: 12 ms, 25.0% idle, speed-up 1.50"
    ]


def test_measurements_begin_at_zero(texts) -> None:
    late = [interval._replace(begin=interval.begin + 1e4, end=interval.end + 1e4) for interval in steps()]
    assert [t for t in texts(late, steps()) if t.startswith("measured")] == [
        "measured: 12 ms, 25.0% idle, speed-up 1.50"
    ]


def test_boxes_have_the_numbers_of_micro_batches_and_letters_of_chunks(texts) -> None:
    schedule = interleaved(2, 2, 2)
    found = texts(None, simulate(schedule, [1] * 4, [1] * 4))
    for label in ("0a", "0b", "1a", "1b"):
        assert found.count(label) == 4  # two devices, forward and backward


def test_numbers_that_do_not_fit_are_left_out(texts) -> None:
    schedule = one_f_one_b(2, 32)
    found = texts(None, simulate(schedule, [0.0001] * 2, [1] * 2))
    assert found.count("31") == 2


@pytest.mark.exhaustive
def test_large_pictures_stay_of_a_size_that_programs_open(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    intervals = simulate(one_f_one_b(16, 64), [0.004] * 16, [0.008] * 16)
    save_picture(tmp_path / "step.png", intervals, intervals)
    data = (tmp_path / "step.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (4500, 1578)


def test_pyplot_is_left_alone(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    before = "matplotlib.pyplot" in sys.modules
    save_picture(tmp_path / "step.png", None, steps())
    assert ("matplotlib.pyplot" in sys.modules) == before


def test_a_format_that_does_not_exist(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="'doc' is not supported"):
        save_picture(tmp_path / "step.doc", None, steps())
