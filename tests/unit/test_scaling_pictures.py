"""Pictures of how speed grows: what they show is what the benchmarks measured."""

from __future__ import annotations

import html
import json
import re

import pytest

from benchmarks import scaling_pictures
from benchmarks.scaling_pictures import Curve, Picture, Point


def drawn(text: str) -> dict:
    """What a picture says that it shows."""
    return json.loads(html.unescape(re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)[1]))


@pytest.mark.parametrize("name", ["scaling_pipeline.svg", "scaling_data_parallel.svg"])
def test_pictures_show_the_results(name):
    panels = scaling_pictures.pictures()[name].panels
    committed = drawn((scaling_pictures.PICTURES / name).read_text())
    assert committed == json.loads(json.dumps(panels)), "run: python -m benchmarks.scaling_pictures"


def test_points_of_pipelines():
    records = [
        {"devices": 2, "microbatches": 4, "schedule": schedule, "samples_ms": samples}
        for schedule, samples in {
            "none": [480.0],
            "gpipe": [300.0, 320.0, 310.0],
            "1f1b": [240.0],
            "interleaved": [480.0],
        }.items()
    ]
    panels = scaling_pictures.of_pipelines(records).panels
    assert list(panels) == ["4 micro-batches"]
    of = {curve.name: curve for curve in panels["4 micro-batches"]}
    assert of["gpipe"].points == [Point(2, 480 / 310, 480 / 320, 480 / 300)]
    assert of["1f1b"].points == [Point(2, 2.0, 2.0, 2.0)]
    assert of["interleaved"].points == [Point(2, 1.0, 1.0, 1.0)]
    assert [point.median for point in of["ideal of gpipe and 1f1b"].points] == [1.0, 2 * 4 / 5]
    assert [point.median for point in of["ideal of interleaved"].points] == [1.0, 2 * 8 / 9]
    assert [name for name, curve in of.items() if curve.measured] == ["gpipe", "1f1b", "interleaved"]


def test_points_of_data_parallelism():
    table = """{}, 12 parameters:

| Framework | 1 process, ms | 2 processes, ms | Efficiency | Time / tfdist's |
|---|--:|--:|--:|--:|
| tfdist | 40.00 (39.00-41.00) | 50.00 (40.00-80.00) | 80% | 1.00 |
| tfdist, compression="bf16" | 40.00 (39.00-41.00) | 50.00 (40.00-80.00) | 80% | 1.00 |
| PyTorch DDP (gloo) | failed | 60.00 (59.00-61.00) |  | 1.20 |
"""
    panels = scaling_pictures.of_data_parallelism(f"{table.format('CNN')}\n{table.format('MLP')}").panels
    points = [Point(1, 1.0, 1.0, 1.0), Point(2, 1.6, 1.0, 2.0)]
    assert panels == {"CNN": [Curve("tfdist", points)], "MLP": [Curve("tfdist", points)]}


def test_axes_say_what_they_count(tmp_path, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    curve = Curve("gpipe", [Point(2, 1.5, 1.4, 1.6), Point(8, 4.0, 4.0, 4.0)])
    scaling_pictures.save(tmp_path / "a.svg", Picture({"a & b": [curve]}, "stages", "speed-up"))
    text = (tmp_path / "a.svg").read_text()
    found = [html.unescape(each) for each in re.findall(r"<text [^>]*>([^<]*)</text>", text)]
    assert {"a & b", "stages", "speed-up", "gpipe", "linear", "2", "8"} <= set(found)
    assert drawn(text) == {"a & b": [["gpipe", [[2, 1.5, 1.4, 1.6], [8, 4.0, 4.0, 4.0]], True]]}
