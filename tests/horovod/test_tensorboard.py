"""`tfdist.callbacks.TensorBoard` with Horovod's transport: one set of files, with what all processes have done."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.cluster.test_tensorboard import BATCH, EPOCHS, METRICS, ROWS, SPEEDS, fit, scalars
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def trained(folder: Path) -> dict:
    import tfdist

    return fit(tfdist.HorovodStrategy(start_timeout=60, peer_timeout=60), folder)


@pytest.mark.exhaustive
def test_two_processes(tmp_path):
    first, other = run_local(trained, args=(tmp_path,), timeout=200)
    assert [Path(path).parent.name for path in first["files"]] == ["train", "validation"]
    assert first["history"] == other["history"]
    written = scalars(tmp_path)
    assert {*METRICS, *SPEEDS} <= set(written)
    values = {tag: [value for (value,) in of_steps.values()] for tag, of_steps in written.items()}
    for metric in ("loss", "mae"):
        assert values[f"train/epoch_{metric}"] == pytest.approx(first["history"][metric], rel=1e-6)
        assert values[f"validation/epoch_{metric}"] == pytest.approx(first["history"][f"val_{metric}"], rel=1e-6)
    counted = np.multiply(values["train/epoch_examples_per_second"], values["train/epoch_seconds"])
    assert counted == pytest.approx([ROWS - BATCH, ROWS, ROWS], rel=1e-5)
    assert len(values["train/epoch_communication"]) == EPOCHS
    assert all(share > 0 for share in values["train/epoch_communication"])
