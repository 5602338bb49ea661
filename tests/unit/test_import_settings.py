"""Which environment variables decide what importing TensorFlow gives."""

from __future__ import annotations

import pytest

from tfdist.launch.import_settings import changed_for_import, shared_part


def test_processes_of_a_run_share_all_but_what_the_launcher_gives_to_each() -> None:
    first = {"HOME": "/h", "TF_CONFIG": "a", "TFDIST_RESTART": "0", "OMP_NUM_THREADS": "1", "TF_X": "1"}
    second = {"HOME": "/h", "TF_CONFIG": "b", "CUDA_VISIBLE_DEVICES": "1", "TF_NUM_INTRAOP_THREADS": "2", "TF_X": "1"}
    assert shared_part(first) == shared_part(second) == {"HOME": "/h", "TF_X": "1"}


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {"TF_ENABLE_ONEDNN_OPTS": "0"}, ["TF_ENABLE_ONEDNN_OPTS"]),
        ({"XLA_FLAGS": "a"}, {}, ["XLA_FLAGS"]),
        ({"OMP_NUM_THREADS": "1"}, {"OMP_NUM_THREADS": "2"}, ["OMP_NUM_THREADS"]),
        ({}, {"TF_USE_LEGACY_KERAS": "1", "KERAS_HOME": "/k"}, ["KERAS_HOME", "TF_USE_LEGACY_KERAS"]),
        ({}, {"KERAS_BACKEND": "jax"}, ["KERAS_BACKEND"]),
        ({}, {"KERAS_BACKEND": "tensorflow"}, []),
        ({}, {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "TF_CONFIG": "{}"}, []),
        ({}, {"WANDB_MODE": "offline", "TFDIST_PROGRESS": "/p"}, []),
        ({"TF_X": "1"}, {"TF_X": "1"}, []),
    ],
)
def test_what_a_script_may_have_changed(before: dict, after: dict, expected: list[str]) -> None:
    assert changed_for_import(before, after) == expected
