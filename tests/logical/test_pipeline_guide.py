"""docs/pipeline.md does what it says: its programs run, one after the other, and print what stands below them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from tests.schedule_pictures import draw
from tfdist.strategies.pipeline.schedule import make_schedule

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
DRAWN = re.compile(r"([\w-]+): (\d+) stages(?: of (\d+) chunks)?, (\d+) micro-batches, ")


@pytest.mark.nightly
def test_programs_print_what_stands_below_them(four_devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    compared = 0
    for (kind, text), (next_kind, expected) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if kind != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(text, str(PAGE), "exec"), names)
        if next_kind == "text" and not DRAWN.match(expected):
            assert printed.getvalue() == expected
            compared += 1
        else:
            assert printed.getvalue() == ""
    assert compared == 1


def test_schedules_are_drawn_as_they_are():
    drawn = [(match, text) for kind, text in BLOCKS if kind == "text" and (match := DRAWN.match(text))]
    assert [match[1] for match, _ in drawn] == ["gpipe", "1f1b", "interleaved", "zb-h1"]
    for match, text in drawn:
        name, stages, chunks, microbatches = match.groups()
        assert text == draw(make_schedule(name, int(stages), int(microbatches), int(chunks or 1))) + "\n"
