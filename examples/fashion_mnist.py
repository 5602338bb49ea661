"""Prepares the dataset fashion_mnist from the files of Debian's package dataset-fashion-mnist, without a download.

Example:
    sudo apt install dataset-fashion-mnist
    python examples/fashion_mnist.py
    tfdist run -n 2 examples/train_digits.py --dataset fashion_mnist
"""

from __future__ import annotations

import argparse
import functools
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import prepared
import tensorflow_datasets as tfds

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
PREFIXES = {"train": "train", "test": "t10k"}
CLASSES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]

_CITATION = """
@article{xiao2017fashion,
  author = {Xiao, Han and Rasul, Kashif and Vollgraf, Roland},
  title = {Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms},
  journal = {CoRR},
  volume = {abs/1708.07747},
  year = {2017},
}
"""


# TensorFlow Datasets has a builder of the same name, which downloads; both may be loaded in one process.
class FashionMnist(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Builder of the dataset `fashion_mnist` from local idx files; the same features as the one that downloads."""

    VERSION = tfds.core.Version("3.0.1")

    def __init__(self, *, source: Path = DEBIAN_FOLDER, **options: Any) -> None:
        self._source = Path(source)
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Zalando's article images: 28x28 greyscale, 10 classes, 60000 for training and 10000 for test.",
            features=tfds.features.FeaturesDict(
                {"image": tfds.features.Image(shape=(28, 28, 1)), "label": tfds.features.ClassLabel(names=CLASSES)}
            ),
            supervised_keys=("image", "label"),
            homepage="https://github.com/zalandoresearch/fashion-mnist",
            citation=_CITATION,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {split: self._generate_examples(prefix) for split, prefix in PREFIXES.items()}

    def _generate_examples(self, prefix: str) -> Iterator[tuple[int, dict[str, Any]]]:
        images = read_idx(self._source / f"{prefix}-images-idx3-ubyte.gz")[..., np.newaxis]
        labels = read_idx(self._source / f"{prefix}-labels-idx1-ubyte.gz")
        for index, (image, label) in enumerate(zip(images, labels, strict=True)):
            yield index, {"image": image, "label": int(label)}


def read_idx(path: Path) -> np.ndarray:
    """Reads a gzipped idx file of unsigned bytes.

    Args:
        path: The file.

    Raises:
        FileNotFoundError: It is not there; the text says which package has it.
        ValueError: It is not an idx file of unsigned bytes.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path} is missing. Install the Debian package dataset-fashion-mnist (apt install dataset-fashion-mnist), "
            "or name the folder with the four idx.gz files: --source FOLDER"
        )
    content = gzip.decompress(path.read_bytes())
    dimensions = content[3] if len(content) > 3 else 0
    if content[:3] != b"\x00\x00\x08" or dimensions == 0:
        raise ValueError(f"{path} starts with {content[:4]!r}; expected an idx file of unsigned bytes. Get it anew.")
    shape = np.frombuffer(content, dtype=">u4", count=dimensions, offset=4)
    return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def main() -> None:
    """Prepares the dataset and prints where it is."""
    parser = argparse.ArgumentParser(description="Prepare fashion_mnist from local idx.gz files.")
    parser.add_argument("--source", type=Path, default=DEBIAN_FOLDER, help="folder of the idx.gz files (%(default)s)")
    parser.add_argument("--data-dir", help="where prepared datasets are kept (default: as TensorFlow Datasets)")
    options = parser.parse_args()
    try:
        builder = prepared.prepare(functools.partial(FashionMnist, source=options.source), options.data_dir)
    except (FileNotFoundError, ValueError) as error:
        raise SystemExit(f"fashion_mnist: {error}") from error
    print(f"fashion_mnist is ready in {builder.data_dir}")


if __name__ == "__main__":
    main()
