"""What is changed in packages that prepare data is there, and still needed: they run here without any change."""

from __future__ import annotations

import inspect
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
import tensorflow_datasets as tfds

from tfdist.cluster import first
from tfdist.cluster.first import PreparationError
from tfdist.compat.patch import TESTED
from tfdist.compat.preparation import PATCHES


class Rows(tfds.core.GeneratorBasedBuilder):
    """Another process, which prepares the same data meanwhile, is faster."""

    VERSION = tfds.core.Version("1.0.0")
    other: Any = None

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict({"x": np.int64}))

    def _split_generators(self, _: Any) -> Any:
        return {"train": self._generate_examples()}

    def _generate_examples(self) -> Any:
        yield 0, {"x": 1}
        if Rows.other is not None:
            other, Rows.other = Rows.other, None
            PATCHES[0].original().__get__(other)()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.package)
def test_what_is_changed_is_there_and_tested(patch) -> None:
    assert callable(patch.original())
    package = {"keras": keras, "keras_hub": keras_hub, "tensorflow_datasets": tfds}[patch.package]
    first, last = (tuple(map(int, bound.split("."))) for bound in TESTED[patch.package])
    assert first <= tuple(map(int, package.__version__.split(".")[:2])) <= last


def test_arguments_are_those_that_are_passed_on() -> None:
    prepare, file, preset = (inspect.signature(patch.original()).parameters for patch in PATCHES)
    assert all(one.kind is one.KEYWORD_ONLY for name, one in prepare.items() if name != "self")
    assert {"fname", "origin", "cache_subdir", "cache_dir"} <= set(file)
    assert list(preset) == ["preset", "path"]


def test_a_dataset_that_another_process_has_prepared_meanwhile_fails(tmp_path: Path) -> None:
    Rows.other = Rows(data_dir=tmp_path)
    with pytest.raises(FileExistsError, match="already exists"):
        PATCHES[0].original().__get__(Rows(data_dir=tmp_path))()


def test_who_prepares_draws_the_same_random_numbers_afterwards(tmp_path: Path) -> None:
    changed, state = PATCHES[0].make(PATCHES[0].original()), random.getstate()
    changed(Rows(data_dir=tmp_path / "changed"))
    assert random.getstate() == state
    PATCHES[0].original().__get__(Rows(data_dir=tmp_path / "original"))()
    assert random.getstate() != state


def test_data_that_tfds_makes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mock_data` replaces what prepares, too: nothing is prepared, and nobody waits."""
    patch = PATCHES[0]
    original = patch.original()
    monkeypatch.setattr(tfds.core.DatasetBuilder, original.__name__, patch.make(original))
    with tfds.testing.mock_data(num_examples=5):
        rows = tfds.load("mnist", split="train", data_dir=tmp_path, as_supervised=True, shuffle_files=True)
    assert [image.shape for image, _ in rows.as_numpy_iterator()] == [(28, 28, 1)] * 5
    assert not list(tmp_path.iterdir())


def test_half_a_file_is_taken_for_the_whole(tmp_path: Path) -> None:
    (tmp_path / "origin").write_bytes(b"12345678")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "file").write_bytes(b"1234")  # another process is writing it
    path = PATCHES[1].original()("file", f"file://{tmp_path}/origin", cache_dir=str(tmp_path))
    assert Path(path).read_bytes() == b"1234"


def test_files_are_locked_where_keras_puts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))

    def get_file(fname: str, origin: str, cache_subdir: str = "datasets", cache_dir: str | None = None) -> list[str]:
        return [path.name for path in tmp_path.iterdir()]

    (lock,) = PATCHES[1].make(get_file)("file", "origin")
    assert lock.startswith(".tfdist-")


@pytest.mark.parametrize(("error", "heard"), [(FileNotFoundError, FileNotFoundError), (OSError, PreparationError)])
def test_who_waits_for_a_file_that_a_preset_does_not_have_hears_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception], heard: type[Exception]
) -> None:
    """As `from_preset` wants to know of `task.weights.h5`; other errors of the first one are the failure of all."""
    waits = threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    monkeypatch.setattr(first, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))

    def get_file(preset: str, path: str) -> str:
        assert waits.wait(60)
        raise error(f"{preset}/{path}")

    changed = PATCHES[2].make(get_file)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(changed, str(tmp_path), "task.weights.h5") for _ in range(2)]
        assert sorted(type(call.exception()).__name__ for call in calls) == sorted([error.__name__, heard.__name__])
