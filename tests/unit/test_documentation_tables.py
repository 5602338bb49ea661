"""The tables of docs/performance.md are those of the benchmarks' pages."""

from __future__ import annotations

import re
from importlib import metadata

import pytest

from tests.unit.pages import ROOT, read
from tools.performance_tables import filled, table_below

PAGE = "docs/performance.md"


def test_tables_are_those_of_the_benchmarks():
    assert filled(read(PAGE), ROOT) == read(PAGE), "run: python tools/performance_tables.py docs/performance.md"


def test_every_table_with_figures_is_one_of_these():
    text = read(PAGE)
    marked = re.findall(r"^<!-- table: [\s\S]*?^<!-- /table -->$", text, re.MULTILINE)
    assert len(marked) == 5
    for table in marked:
        assert len(re.findall(r"^\|.*\d\.\d", table, re.MULTILINE)) >= 3
        text = text.replace(table, "")
    assert not re.search(r"^\|.*\d\.\d", text, re.MULTILINE)


def test_another_figure_is_renewed(tmp_path):
    (tmp_path / "page.md").write_text("## Speed\n\nof two\n\n| a |\n|---|\n| 1.0 |\n\n| b |\n")
    text = "x\n<!-- table: page.md, ## Speed -->\n\n| a |\n|---|\n| 2.0 |\n\n<!-- /table -->\ny\n"
    assert filled(text, tmp_path) == text.replace("2.0", "1.0")


def test_a_table_that_is_not_there():
    with pytest.raises(ValueError, match=r"Received: '## Size'. Expected: the beginning of a line above a table"):
        table_below("## Speed\n\n| a |\n", "## Size")
    with pytest.raises(ValueError, match=r"Received: '3' for 'of'. Expected: one of the first two cells of a row"):
        table_below("of two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", "of", "3")


def test_rows_with_a_cell(tmp_path):
    (tmp_path / "page.md").write_text("of two\n\n| a | b |\n|---|---|\n| x | 1 |\n| x | 11 |\n| 1 | y |\n")
    text = "<!-- table: page.md, of two | 1 -->\n<!-- /table -->\n"
    kept = "<!-- table: page.md, of two | 1 -->\n\n| a | b |\n|---|---|\n| x | 1 |\n| 1 | y |\n\n<!-- /table -->\n"
    assert filled(text, tmp_path) == filled(kept, tmp_path) == kept


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
