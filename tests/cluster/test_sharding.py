"""`AutoShardPolicy.FILE`: every worker reads its own files, and every row is trained on equally often."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.counting import EPOCHS, ROWS
from tfdist.testing import run_local

pytestmark = pytest.mark.cluster


def from_files(folder: str) -> list[float]:
    """Runs on every process: how often each row of two files is seen."""
    import tensorflow as tf

    import tfdist
    from tests.cluster.counting import SIZE, times_seen

    strategy = tfdist.MultiWorkerMirroredStrategy(start_timeout=60, peer_timeout=30)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.FILE

    def parse(line: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.one_hot(tf.strings.to_number(line, tf.int32), ROWS), tf.zeros([1])

    files = [str(Path(folder) / f"{i}.txt") for i in range(2)]
    return times_seen(strategy, tf.data.TextLineDataset(files).map(parse).batch(SIZE).with_options(options))


def assert_every_row_is_seen(folder: Path, **environment: str) -> None:
    for i in range(2):
        rows = range(i * ROWS // 2, (i + 1) * ROWS // 2)
        (folder / f"{i}.txt").write_text("\n".join(map(str, rows)) + "\n")
    chief, other = run_local(from_files, args=(str(folder),), timeout=120, env=environment)
    assert chief == other
    assert chief == pytest.approx([EPOCHS] * ROWS)


def test_every_row_is_seen_once_an_epoch(tmp_path):
    assert_every_row_is_seen(tmp_path)
