"""Two workers prepare the same data at the same time, as scripts do that were written for one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.attempt import logged
from tfdist.testing import run_local

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(240)]
ROWS = 64


def builder_class() -> Any:
    """A builder whose preparation takes a moment."""
    import time

    import numpy as np
    import tensorflow_datasets as tfds

    class Numbers(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"x": tfds.features.Tensor(shape=(2,), dtype=np.float32), "y": np.float32}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("x", "y")
            )

        def _split_generators(self, _: Any) -> Any:
            return {"train": self._generate_examples()}

        def _generate_examples(self) -> Any:
            time.sleep(1.0)
            for i in range(ROWS):
                yield i, {"x": np.full(2, i, np.float32), "y": float(i)}

    return Numbers


def prepared(folder: str) -> dict[str, Any]:
    """All that a script may prepare. Meets the other process before each, so that both begin together."""
    import keras
    import numpy as np
    import tensorflow as tf
    import tensorflow_datasets as tfds

    import tfdist

    found: dict[str, Any] = {}
    strategy = tfdist.MultiWorkerMirroredStrategy()
    rank = tfdist.discover().rank
    numbers = builder_class()

    def together() -> None:
        strategy._peers.gather("test", rank, "come")

    def rows(dataset: Any) -> list[float]:
        return sorted(float(y) for _, y in dataset)

    together()
    dataset = tfds.load(numbers.name, split="train", data_dir=f"{folder}/data", as_supervised=True, shuffle_files=True)
    found["load"] = rows(dataset)
    # A builder that was made before the other process had prepared the data.
    builder = numbers(data_dir=f"{folder}/more")
    together()
    builder.download_and_prepare()
    in_order = builder.as_dataset(split="train", as_supervised=True)
    found["builder"] = rows(in_order)

    together()
    path = keras.utils.get_file("file", f"file://{folder}/origin", cache_dir=f"{folder}/keras")
    found["file"] = Path(path).stat().st_size
    together()
    dataset.save(f"{folder}/saved")
    found["saved"] = rows(tf.data.Dataset.load(f"{folder}/saved"))

    # As a process has left it that was killed while it wrote.
    Path(f"{folder}/cache.rank{rank}_0.lockfile").touch()
    made: list[Any] = []
    found["warning"] = logged(lambda: made.append(in_order.cache(f"{folder}/cache").batch(8)))
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanMetricWrapper(lambda y, _: y, name="y")])
    model.optimizer.learning_rate = 0.0
    history = model.fit(made[0].map(lambda x, y: (x, y[:, None])), epochs=2, verbose=0, shuffle=False).history
    found["means"] = np.round(history["y"], 4).tolist()
    return found


def test_both_find_what_one_of_them_has_prepared(tmp_path: Path) -> None:
    (tmp_path / "origin").write_bytes(os.urandom(50_000_000))
    found = run_local(prepared, args=(str(tmp_path),), timeout=200)
    for rank, one in enumerate(found):
        assert one["load"] == one["builder"] == one["saved"] == list(map(float, range(ROWS)))
        assert one["file"] == 50_000_000
        assert one["means"] == [31.5, 31.5]
        assert len(one["warning"]) == 1 and f"cache.rank{rank}_0.lockfile" in one["warning"][0]
