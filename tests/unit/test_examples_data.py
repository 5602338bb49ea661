"""The example datasets: contents, preparation by several processes at once, and what happens when one is missing.

TensorFlow Datasets starts TensorFlow, which the other unit tests must not find in their process: all of this runs in
child processes.
"""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="needs the extra `examples`")
EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 120.0

PREPARE_DIGITS = """
import collections, json, sys
import numpy as np
import prepared
from digits import Digits
builder = prepared.prepare(Digits, sys.argv[1])
reader = {name: builder.as_dataset(split=name, as_supervised=True) for name in ("train", "test")}
splits = {name: list(dataset.as_numpy_iterator()) for name, dataset in reader.items()}
counts = {name: collections.Counter(int(label) for _, label in split) for name, split in splits.items()}
images = np.stack([image for split in splits.values() for image, _ in split])
keys = {name: {image.tobytes() for image, _ in split} for name, split in splits.items()}
found = prepared.find("digits", sys.argv[1])
print(json.dumps({
    "sizes": {name: len(split) for name, split in splits.items()},
    "info": {name: split.num_examples for name, split in found.info.splits.items()},
    "classes": {name: [count[label] for label in range(10)] for name, count in counts.items()},
    "shape": list(images.shape), "dtype": str(images.dtype), "low": int(images.min()), "high": int(images.max()),
    "ink": float(images.mean()), "overlap": len(keys["train"] & keys["test"]),
    "keys": list(found.info.supervised_keys), "labels": found.info.features["label"].num_classes,
    "citation": found.info.citation, "description": found.info.description,
}))
"""

PREPARE_AT_ONCE = """
import pathlib, random, sys, time
import prepared
import tensorflow as tf
from digits import Digits
folder, rank, others = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
# Training scripts give every worker the same seed.
random.seed(1)
(folder / f"ready-{rank}").touch()
while len(list(folder.glob("ready-*"))) < others:
    time.sleep(0.01)
builder = prepared.prepare(Digits, str(folder / "data"))
print(len(list(builder.as_dataset(split="train"))), len(list(builder.as_dataset(split="test"))))
"""

DRAW_AFTER_LOADING = """
import hashlib, json, random, sys
import keras
import numpy as np
import prepared
import train_digits
from digits import Digits
folder = sys.argv[1]
keras.utils.set_random_seed(1)
prepared.prepare(Digits, folder + "/control")
control = random.random()
sys.argv = ["train_digits.py", "--data-dir", folder + "/data"]
train, _, _ = train_digits.load(train_digits.parse_arguments())
images = np.concatenate([image for image, _ in train.as_numpy_iterator()])
weights = keras.initializers.GlorotUniform()((2, 2)).numpy().tolist()
drawn = [random.random(), np.random.random(), weights, hashlib.sha256(images.tobytes()).hexdigest()]
print(json.dumps({"drawn": drawn, "control": control}))
"""

READ_FASHION = """
import sys
import prepared
builder = prepared.find("fashion_mnist", sys.argv[1])
for split in ("train", "test"):
    for image, label in builder.as_dataset(split=split, as_supervised=True).as_numpy_iterator():
        print(split, image.shape, int(image[0, 0, 0]), builder.info.features["label"].int2str(int(label)))
"""


def start(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    everything = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent)]),
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        **(env or {}),
    }
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=everything, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        output, errors = process.communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        process.terminate()
        time.sleep(1)
        process.kill()
        output, errors = process.communicate()
        pytest.fail(f"no end after {DEADLINE} s:\n{output}\n{errors}")
    return process.returncode, output, errors


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Facts about the prepared digits."""
    code, output, errors = finish(start("-c", PREPARE_DIGITS, tmp_path_factory.mktemp("digits")))
    assert code == 0, errors
    return json.loads(output.splitlines()[-1])


@pytest.mark.exhaustive
def test_digits_has_the_promised_splits(digits: dict[str, object]) -> None:
    assert digits["sizes"] == digits["info"] == {"train": 1500, "test": 297}
    assert digits["overlap"] == 0


@pytest.mark.exhaustive
def test_digits_is_balanced(digits: dict[str, object]) -> None:
    assert digits["classes"] == {
        "train": [149, 152, 148, 153, 151, 152, 151, 149, 145, 150],
        "test": [29, 30, 29, 30, 30, 30, 30, 30, 29, 30],
    }


@pytest.mark.exhaustive
def test_digits_images_are_bytes_over_the_whole_range(digits: dict[str, object]) -> None:
    assert digits["shape"] == [1797, 8, 8, 1]
    assert (digits["dtype"], digits["low"], digits["high"]) == ("uint8", 0, 255)
    # The mean of scikit-learn's pixels is 4.884 of 16.
    assert digits["ink"] == pytest.approx(4.884 * 255 / 16, abs=0.1)


@pytest.mark.exhaustive
def test_digits_is_described(digits: dict[str, object]) -> None:
    assert digits["keys"] == ["image", "label"]
    assert digits["labels"] == 10
    assert "UCI Machine Learning Repository" in digits["citation"]
    assert "every sixth image, starting with the fifth" in str(digits["description"]).replace("\n", " ")


@pytest.mark.exhaustive
def test_processes_may_prepare_at_the_same_time(tmp_path: Path) -> None:
    processes = [start("-c", PREPARE_AT_ONCE, tmp_path, rank, 3) for rank in range(3)]
    results = [finish(process) for process in processes]
    assert [code for code, _, _ in results] == [0, 0, 0], "\n".join(errors for _, _, errors in results)
    assert {output.splitlines()[-1] for _, output, _ in results} == {"1500 297"}
    assert [path.name for path in (tmp_path / "data" / "digits").iterdir()] == ["1.0.0"]


@pytest.mark.exhaustive
def test_the_first_run_which_prepares_the_data_draws_what_later_ones_draw(tmp_path: Path) -> None:
    results = [finish(start("-c", DRAW_AFTER_LOADING, tmp_path)) for _ in range(2)]
    assert [code for code, _, _ in results] == [0, 0], results[0][2] + results[1][2]
    first, second = (json.loads(output.splitlines()[-1]) for _, output, _ in results)
    assert first["drawn"] == second["drawn"]
    # Without its order the example would not have that: to prepare a dataset draws random numbers.
    assert first["control"] != second["control"]


def write_idx(folder: Path, prefix: str, count: int) -> None:
    """Writes `count` images; the first pixel of image n is n, and so is its label."""
    images = struct.pack(">4I", 0x803, count, 28, 28) + b"".join(bytes([n]) + bytes(783) for n in range(count))
    labels = struct.pack(">2I", 0x801, count) + bytes(range(count))
    (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
    (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))


@pytest.mark.exhaustive
def test_fashion_mnist_is_built_from_idx_files(tmp_path: Path) -> None:
    write_idx(tmp_path, "train", 3)
    write_idx(tmp_path, "t10k", 2)
    data = tmp_path / "data"
    script = EXAMPLES / "fashion_mnist.py"
    code, output, errors = finish(start(script, "--source", tmp_path, "--data-dir", data))
    assert code == 0, errors
    assert f"fashion_mnist is ready in {data}/fashion_mnist/3.0.1" in output
    code, output, errors = finish(start("-c", READ_FASHION, data))
    assert code == 0, errors
    assert sorted(output.splitlines()) == [
        "test (28, 28, 1) 0 T-shirt/top",
        "test (28, 28, 1) 1 Trouser",
        "train (28, 28, 1) 0 T-shirt/top",
        "train (28, 28, 1) 1 Trouser",
        "train (28, 28, 1) 2 Pullover",
    ]


def test_missing_idx_files_are_named_with_the_package_that_has_them(tmp_path: Path) -> None:
    script = EXAMPLES / "fashion_mnist.py"
    code, _, errors = finish(start(script, "--source", tmp_path / "none", "--data-dir", tmp_path / "data"))
    assert code == 1
    assert f"fashion_mnist: {tmp_path}/none/train-images-idx3-ubyte.gz is missing" in errors
    assert "apt install dataset-fashion-mnist" in errors


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("mnist", "tfds build mnist --data_dir={data}"),
        ("fashion_mnist", "python examples/fashion_mnist.py --data-dir={data}"),
    ],
)
@pytest.mark.exhaustive
def test_a_dataset_that_is_not_prepared_fails_at_once(tmp_path: Path, name: str, remedy: str) -> None:
    started = time.monotonic()
    script = EXAMPLES / "train_digits.py"
    code, _, errors = finish(start(script, "--dataset", name, "--data-dir", tmp_path))
    assert code == 1
    assert f"the dataset '{name}' is not prepared: nothing was found in {tmp_path}/{name}" in errors
    assert remedy.format(data=tmp_path) in errors
    assert time.monotonic() - started < 60
