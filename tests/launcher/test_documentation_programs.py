"""Every program of the documentation runs: in one process, and those of the guides under `tfdist run`, too."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.conftest import SOURCE
from tests.unit.pages import PAGES, Block, blocks_of, side
from tfdist.launcher.plan import versions
from tfdist.strategies.horovod.installation import problem

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE = 120.0

# What is compiled only, and why; see tests/unit/test_documentation.py.
NOT_RUN = {
    "docs/clusters/ray.md": "needs Ray",
    "docs/clusters/sagemaker.md": "needs an account of Amazon SageMaker",
    "docs/clusters/vertex-ai.md": "needs an account of Google Cloud",
    "docs/remote-storage.md": "needs a bucket",
    "docs/tensorflow-datasets.md": "fragments about data that are not there; the example is a whole script",
}
# Pages with tests of their own.
ELSEWHERE = {
    "docs/logging.md": "tests/launcher/test_loggers.py",
    "docs/parameter-server.md": "tests/launcher/test_parameter_server_guide.py",
    "docs/pipeline.md": "tests/logical/test_pipeline_guide.py",
    "docs/tuning.md": "tests/launcher/tuning/test_programs.py",
}
# Pages whose diff is a whole script: what is to become of it is run.
WHOLE_DIFFS = (
    "README.md",
    "docs/moving/from-horovod.md",
    "docs/moving/from-tf-distribute.md",
    "docs/moving/from-tf-keras.md",
)
# Packages that tfdist does not require.
NEEDS = {"docs/monitoring.md": "tensorboard", "docs/orbax.md": "orbax"}
# What fragments take for granted.
GIVEN = """
import keras
import numpy as np
import tfdist

x, y = np.ones((64, 4), "float32"), np.ones((64, 1), "float32")


def build_model():
    model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(4)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


model = build_model()
"""
WITH_FRAGMENTS = ("README.md", "docs/fault-tolerance.md", "docs/submit.md")
# Of strategies that take one device of a process.
ONE_DEVICE = ("docs/local-steps.md",)
# The command, and what the first process prints last.
UNDER_THE_LAUNCHER = {
    "docs/choosing.md": (("-n", "2"), "equal"),
    "docs/data-parallel.md": (("-n", "2"), "trained"),
    "docs/fully-sharded.md": (("-n", "2"), "saved"),
    "docs/local-steps.md": (("-n", "2"), "trained"),
    "docs/moving/from-horovod.md": (("-n", "2"), None),
    "docs/moving/from-tf-distribute.md": (("-n", "2"), None),
    "docs/own-loops.md": (("-n", "2"), "trained for 3 epochs"),
    "docs/performance.md": (("-n", "2"), None),
    "docs/quickstart.md": (("-n", "2"), "replicas: 2, accuracy: 0.93"),
}


def programs(page: str) -> list[Block]:
    return blocks_of(page, "python", *(["diff"] if page in WHOLE_DIFFS else []))


def code(block: Block) -> str:
    return side(block.text, "+") if block.language == "diff" else block.text


RUN = [page for page in PAGES if programs(page) and page not in NOT_RUN and page not in ELSEWHERE]


# A program that fails, and one that prints something else than what stands below it.
CONTROLS = {"fails": ("1 / 0", None), "prints": ("print(1 + 1)", "3\n")}


def requests(folder: str) -> list[dict[str, Any]]:
    """For each page, and each control, what tests/launcher/page_programs.py is asked for."""
    given = {page: GIVEN if page in WITH_FRAGMENTS else "" for page in RUN}
    blocks = {page: [(block.line, code(block), block.output) for block in programs(page)] for page in RUN}
    blocks |= {name: [(1, *program)] for name, program in CONTROLS.items()}
    found = []
    for number, (page, own) in enumerate(blocks.items()):
        (place := Path(folder, str(number))).mkdir()
        of_page = {"devices": 1 if page in ONE_DEVICE else 2, "given": given.get(page, ""), "blocks": own}
        found.append({"page": page, "folder": str(place), **of_page})
    return found


def run_pages(requested: list[dict[str, Any]]) -> dict[str, str]:
    """What is wrong with each page."""
    threads = {"TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.launcher.page_programs"],
        cwd=SOURCE,
        env={**os.environ, **threads, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "3", "MPLBACKEND": "agg"},
        input=json.dumps(requested),
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@functools.cache
def errors() -> dict[str, str]:
    """What is wrong with the programs of each page, in one process a page, two pages at a time."""
    with tempfile.TemporaryDirectory(prefix="tfdist-pages-") as folder, ThreadPoolExecutor(2) as pool:
        requested = requests(folder)
        first, second = pool.map(run_pages, (requested[::2], requested[1::2]))
        return first | second


@pytest.mark.parametrize("page", RUN)
@pytest.mark.nightly
def test_programs_run_in_one_process(page):
    if page in NEEDS:
        pytest.importorskip(NEEDS[page])
    assert errors()[page] == ""


@pytest.mark.nightly
def test_what_is_wrong_is_found():
    assert "ZeroDivisionError: division by zero" in errors()["fails"]
    assert errors()["prints"] == "prints:1 printed\n2\ninstead of\n3\n"


@pytest.mark.parametrize("page", UNDER_THE_LAUNCHER)
@pytest.mark.nightly
def test_programs_run_under_the_launcher(page, warm_launch, tmp_path):
    if "horovod" in page and (reason := problem(versions()["tensorflow"])):
        pytest.skip(reason)
    options, last = UNDER_THE_LAUNCHER[page]
    (tmp_path / "train.py").write_text("\n".join(code(block) for block in programs(page)))
    started = warm_launch("", command=["run", "--max-restarts", "0", *options, "train.py"])
    result = started.finish(DEADLINE)
    assert result.code == 0, f"{result.out[-3000:]}\n{result.err[-3000:]}"
    if last is not None:
        assert result.out.splitlines()[-1] == f"[worker 0] {last}"
        assert any(last in block.text for block in blocks_of(page, "python", "console"))
    started.assert_nothing_is_left()


def test_lists_of_pages_are_of_pages_with_programs():
    for page in (*NOT_RUN, *ELSEWHERE, *NEEDS, *WITH_FRAGMENTS, *UNDER_THE_LAUNCHER, *WHOLE_DIFFS, *ONE_DEVICE):
        assert programs(page), page
    for test in ELSEWHERE.values():
        assert (SOURCE / test).exists()
    assert len(RUN) >= 10
