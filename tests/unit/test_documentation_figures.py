"""Tables and pictures show what the benchmarks measured."""

from __future__ import annotations

import html
import json
import re
from importlib import metadata
from pathlib import Path

import pytest

from benchmarks import scaling_pictures
from benchmarks.data_parallel.table import fill
from benchmarks.faults.__main__ import report
from benchmarks.faults.rows import PLAIN, ROWS, RUN, set_format
from benchmarks.faults.table import NOT_THERE
from tests.unit.pages import ROOT, read
from tfdist.checkpoint.manifest import MANIFEST_NAME, Manifest, decode_manifest, encode_manifest
from tools import draw_recording
from tools.performance_tables import filled

PAGE = "docs/performance.md"


def test_tables_are_those_of_the_benchmarks():
    assert filled(read(PAGE), ROOT) == read(PAGE), "run: python tools/performance_tables.py docs/performance.md"


def test_every_table_with_figures_is_one_of_these():
    text = read(PAGE)
    marked = re.findall(r"^<!-- table: [\s\S]*?^<!-- /table -->$", text, re.MULTILINE)
    assert len(marked) == 3
    for table in marked:
        assert len(re.findall(r"^\|.*\d\.\d", table, re.MULTILINE)) >= 3
        text = text.replace(table, "")
    assert not re.search(r"^\|.*\d\.\d", text, re.MULTILINE)


def test_the_readme_has_the_figures_of_one_run_of_the_benchmark():
    speed = read("README.md").partition("## Speed")[2].partition("\n## ")[0]
    figures = re.findall(r"(\d+\.\d) \((\d+) %\)", speed)
    measured = read("benchmarks/data_parallel/README.md")
    rows = re.findall(r"^\|[^|]+\|[^|]+\| (\d+\.\d+) \([^|]+\| (\d+)% \|", measured, re.MULTILINE)
    assert len(figures) == 5
    assert {*figures} <= {(f"{float(time):.1f}", efficiency) for time, efficiency in rows}


def test_the_page_of_gpus_has_what_tensorflow_was_built_with():
    import tensorflow as tf

    if not tf.__version__.startswith("2.21."):
        pytest.skip("the page is about TensorFlow 2.21")
    page, info = read("docs/gpus.md"), tf.sysconfig.get_build_info()
    if not info["is_cuda_build"]:
        pytest.skip("a TensorFlow without CUDA")
    assert f"CUDA {info['cuda_version']}, cuDNN {info['cudnn_version']}" in page
    levels = [name.removeprefix("sm_") for name in info["cuda_compute_capabilities"] if name.startswith("sm_")]
    assert f"code for {', '.join(f'{level[0]}.{level[1:]}' for level in levels)}." in page
    assert "From 9.0 on" in page and "compute_90" in info["cuda_compute_capabilities"]
    least = dict(re.findall(r"nvidia-(\w+)-cu12<[\d.]+,>=([\d.]+)", "\n".join(metadata.requires("tensorflow"))))
    assert f"cuDNN from {'.'.join(least['cudnn'].split('.')[:2])}; NCCL from {least['nccl']} " in page
    assert least["cublas"].startswith("12.5.") and "libraries of CUDA 12, from 12.5" in page


RESULTS = json.loads(read("benchmarks/faults/results.json"))
FAULTS_PAGE = "docs/fault-tolerance.md"


def test_the_tables_are_those_of_the_results():
    readme = read("benchmarks/faults/README.md")
    assert fill(readme, report(RESULTS)) == readme
    assert filled(read(FAULTS_PAGE), ROOT) == read(FAULTS_PAGE), "run: python tools/performance_tables.py"


def test_a_fault_that_a_job_cannot_have_says_why():
    measured = {(record["name"], record["under"]) for record in RESULTS["records"]}
    possible = {(row.name, under) for row in ROWS for under in row.under}
    assert measured == possible
    assert set(NOT_THERE) == {(row.name, under) for row in ROWS for under in (RUN, PLAIN)} - possible


def test_no_training_ends_otherwise():
    for record in RESULTS["records"]:
        assert not record["result"].startswith("other"), record


def test_a_backup_of_a_later_format_is_whole(tmp_path: Path):
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(encode_manifest(Manifest({"epoch": 1}, {}, {})))
    set_format(tmp_path)
    with pytest.raises(ValueError, match="has the format 2"):
        decode_manifest(path.read_bytes())


def drawn(text: str) -> dict:
    """What a picture says that it shows."""
    return json.loads(html.unescape(re.search(r"<dc:description>(.*?)</dc:description>", text, re.DOTALL)[1]))


@pytest.mark.parametrize("name", ["scaling_pipeline.svg", "scaling_data_parallel.svg"])
def test_pictures_show_the_results(name):
    panels = scaling_pictures.pictures()[name].panels
    committed = drawn((scaling_pictures.PICTURES / name).read_text())
    assert committed == json.loads(json.dumps(panels)), "run: python -m benchmarks.scaling_pictures"


def test_the_terminal_shows_the_recorded_run():
    recording = scaling_pictures.PICTURES / "killed_run.txt"
    drawn_again = draw_recording.drawn(recording.read_text(encoding="utf-8"))
    assert recording.with_suffix(".svg").read_text(encoding="utf-8") == drawn_again, "run: tools/draw_recording.py"
