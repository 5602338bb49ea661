"""The example of a ResNet: made-up images, TFRecord files, the precision, and a kill in an epoch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.examples.conftest import values

SMALL = ["--model=small", "--image-size=32", "--batch-size=64", "--epochs=3", "--warm-up=1"]

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]


def accuracy_of(printed: str) -> float:
    ((accuracy,),) = [re.findall(r"^validation accuracy: ([\d.]+), top 5: [\d.]+; the best, ", printed, re.MULTILINE)]
    return float(accuracy)


@pytest.mark.nightly
def test_two_workers_that_read_all_train_what_one_trains(example) -> None:
    options = ["--synthetic", *SMALL, "--read=all"]
    two = values(example("train_resnet.py", *options, run=["-n", "2"]), "loss")
    one = values(example("train_resnet.py", *options), "loss")
    other = values(example("train_resnet.py", *options, "--seed=2"), "loss")
    assert len(one) == 3
    assert two == pytest.approx(one, abs=0.02)
    assert other != pytest.approx(one, abs=0.02)


# --- Files ----------------------------------------------------------------------------------------------------------


def write_images(folder: Path, split: str, count: int) -> None:
    """A folder of JPEG files for each of three classes, which differ in their colour; sizes differ, too."""
    from PIL import Image

    generator = np.random.default_rng(len(split))
    for place, name in enumerate(("blue", "green", "red")):
        (folder / split / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 60, (40 + number, 60 - number, 3), dtype=np.uint8)
            pixels[..., 2 - place] += 150
            Image.fromarray(pixels).save(folder / split / name / f"{number}.{'JPEG' if number % 2 else 'jpg'}", "JPEG")


READ = """
import json, sys
import tensorflow as tf
import train_resnet
found = []
for path in sys.argv[1:]:
    for record in tf.data.TFRecordDataset(path):
        jpeg, label = train_resnet.parse(record)
        pixels = tf.reduce_mean(tf.cast(tf.io.decode_jpeg(jpeg), tf.float32), axis=(0, 1))
        found.append([path, int(label), int(tf.argmax(pixels)), tf.io.extract_jpeg_shape(jpeg).numpy().tolist()])
print(json.dumps(found))
"""


@pytest.mark.nightly
def test_files_are_written_from_folders_and_trained_on(example, tmp_path: Path) -> None:
    pytest.importorskip("PIL", reason="makes the images")
    write_images(tmp_path / "images", "train", 16)
    write_images(tmp_path / "images", "validation", 4)
    printed = example("train_resnet.py", "--write-records=images", "--data=records", "--shards=3")
    assert "train: 48 images of 3 classes in 3 files" in printed
    info = json.loads((tmp_path / "records" / "info.json").read_text())
    assert info == {"classes": ["blue", "green", "red"], "train": 48, "validation": 12}
    names = sorted(path.name for path in (tmp_path / "records").glob("train-*"))
    assert names == [f"train-0000{shard}-of-00003.tfrecord" for shard in range(3)]

    command = [sys.executable, "-c", READ, *(str(tmp_path / "records" / name) for name in names)]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Every image once, with its class; each file has some of all classes.
    assert all(label == 2 - channel for _, label, channel, _ in found)
    sizes = sorted((label, size) for _, label, _, size in found)
    assert sizes == sorted((label, [40 + n, 60 - n, 3]) for label in range(3) for n in range(16))
    assert {(path, label) for path, label, _, _ in found} == {(path, n) for path in command[3:] for n in range(3)}

    options = ["--data=records", "--model=small", "--image-size=32", "--batch-size=8", "--epochs=4", "--warm-up=0"]
    options += ["--learning-rate=0.5"]
    for read in ("own", "all"):
        printed = example("train_resnet.py", *options, f"--read={read}", run=["-n", "2"])
        losses = values(printed, "loss")
        assert losses[-1] < losses[0], printed[-3000:]
        assert "6/6 - " in printed
        # By chance: 0.33.
        assert accuracy_of(printed) > 0.6
