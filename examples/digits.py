"""The handwritten digits that ship with scikit-learn, as a TensorFlow Datasets builder that downloads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

_DESCRIPTION = """
1797 greyscale images, 8x8 pixels, of handwritten digits by 13 people: the test set of the UCI Optical Recognition of
Handwritten Digits data. Of each class, every sixth image, starting with the fifth, is in the test split (297 images);
the others are in the train split (1500).
"""

_CITATION = """
@misc{alpaydin1998digits,
  author = {Alpaydin, E. and Kaynak, C.},
  title = {Optical Recognition of Handwritten Digits},
  year = {1998},
  howpublished = {UCI Machine Learning Repository},
  doi = {10.24432/C50P49},
}
"""

SPLITS = ("train", "test")


class Digits(tfds.core.GeneratorBasedBuilder):
    """Builder of the dataset `digits`, with the splits `train` (1500 images) and `test` (297).

    Example:
        >>> import prepared
        >>> builder = prepared.prepare(Digits)  # doctest: +SKIP
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First release."}  # noqa: RUF012 - TensorFlow Datasets reads a plain dict here

    def _info(self) -> tfds.core.DatasetInfo:
        # `dataset_info_from_configs` wants a package folder with metadata files; a builder in a plain file has none.
        return tfds.core.DatasetInfo(
            builder=self,
            description=_DESCRIPTION,
            features=tfds.features.FeaturesDict(
                {"image": tfds.features.Image(shape=(8, 8, 1)), "label": tfds.features.ClassLabel(num_classes=10)}
            ),
            supervised_keys=("image", "label"),
            homepage="https://archive.ics.uci.edu/dataset/80",
            citation=_CITATION,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        # scikit-learn's pixels are 0..16.
        images = np.rint(digits.images * (255 / 16)).astype(np.uint8)[..., np.newaxis]
        for index in np.flatnonzero(in_test_split(digits.target) == (split == "test")):
            yield int(index), {"image": images[index], "label": int(digits.target[index])}


def in_test_split(labels: np.ndarray) -> np.ndarray:
    """Which images are held out: every sixth of each class, starting with the fifth.

    Counting within the class keeps the classes balanced; every sixth of the whole would not, as the digits come in
    runs of ten.

    Args:
        labels: The class of each image, in the order of the source.

    Returns:
        One boolean for each image.

    Example:
        >>> in_test_split(np.array([7, 7, 7, 7, 7, 7])).tolist()
        [False, False, False, False, True, False]
    """
    held_out = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        held_out[np.flatnonzero(labels == label)[4::6]] = True
    return held_out
