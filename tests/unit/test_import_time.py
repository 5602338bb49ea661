"""What importing tfdist loads: no TensorFlow until a strategy is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("tensorflow", "keras", "numpy")


def loaded_by(statement: str) -> list[str]:
    """Which heavy modules a fresh interpreter has after a statement."""
    code = f"import sys\n{statement}\nprint(*(m for m in {HEAVY!r} if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.split()


@pytest.mark.parametrize(
    "statement",
    [
        "import tfdist",
        "import tfdist.cluster",
        "import tfdist.launcher.command",
        "import tfdist.launcher.completion.installation",
        "from tfdist.launcher.command import main\nfor name in main.list_commands(None): main.get_command(None, name)",
        "import tfdist; tfdist.discover(); tfdist.ClusterConfig; tfdist.ClusterError; dir(tfdist)",
        "import tfdist.cluster.preflight, tfdist.cluster.barrier, tfdist.cluster.ports",
        "import tfdist.testing; dir(tfdist.testing)",
        "from tfdist.testing import run_local",
        "import tfdist.strategies.pipeline.schedule, tfdist.strategies.pipeline.timeline",
        "import tfdist.layer_graph.partition, tfdist.strategies.pipeline.timeline",
    ],
)
def test_no_tensorflow(statement):
    assert loaded_by(statement) == []


def test_a_strategy_loads_tensorflow():
    assert loaded_by("import tfdist; tfdist.MirroredStrategy") == list(HEAVY)
