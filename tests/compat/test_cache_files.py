"""Files of `Dataset.cache(path)`: what a killed process has left is removed, and nothing of another cache."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from tfdist.compat.cache_files import PATCHES


def test_a_cache_whose_name_begins_like_that_of_another_one(tmp_path: Path) -> None:
    for patch in PATCHES:
        patch.install()
    rows, path = tf.data.Dataset.range(8), str(tmp_path / "rows")
    being_written = [iter(rows.cache(f"{path}{end}")) for end in ("_validation", "_2")]
    assert [int(next(iterator)) for iterator in being_written] == [0, 0]
    for left in ("_0.lockfile", "_1.data-00000-of-00001.tempstate7"):
        Path(path + left).touch()
    assert list(rows.cache(path).as_numpy_iterator()) == list(range(8))
    assert not [*tmp_path.glob("rows_[0-9].lockfile"), *tmp_path.glob("rows_1.*")]
    assert [len(list(iterator)) for iterator in being_written] == [7, 7]
