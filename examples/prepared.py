"""Prepared TensorFlow Datasets on disk: makes and finds them without ever using the network."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable

import tensorflow_datasets as tfds
from tensorflow_datasets.core.read_only_builder import ReadOnlyBuilder, builder_from_files
from tensorflow_datasets.core.utils import gcs_utils

# Asking Google's storage whether it has the dataset takes minutes of retries where there is no network. Releases of
# TensorFlow Datasets differ in whether that is the default.
gcs_utils._is_gcs_disabled = True
tfds.disable_progress_bar()


class DatasetNotPreparedError(FileNotFoundError):
    """The dataset is not on disk; the text says where it was looked for and how to prepare it."""


def prepare(make_builder: Callable[..., tfds.core.DatasetBuilder], data_dir: str | None = None) -> ReadOnlyBuilder:
    """Prepares a dataset unless it is there already.

    Several processes may do so at the same time: each writes into a private folder and renames that to the final name.
    Whoever comes second cannot rename onto the folder of the first, and uses what the first one wrote.

    Args:
        make_builder: Makes the builder that generates the dataset; called with the keyword `data_dir`.
        data_dir: The folder of prepared datasets; the default is that of TensorFlow Datasets.

    Returns:
        The builder that reads the prepared files.

    Raises:
        OSError: The files cannot be written.

    Example:
        >>> from digits import Digits
        >>> prepare(Digits).info.splits["train"].num_examples  # doctest: +SKIP
        1500
    """
    final = os.fspath(make_builder(data_dir=data_dir).data_dir)
    if not _is_prepared(final):
        parent = os.path.dirname(final)
        os.makedirs(parent, exist_ok=True)
        # TensorFlow Datasets has temporary folders too, but draws their names from the global random generator: workers
        # with the same seed would write into the same one.
        with tempfile.TemporaryDirectory(prefix="incomplete.", dir=parent) as private:
            builder = make_builder(data_dir=private)
            builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
            try:
                os.rename(builder.data_dir, final)
            except OSError:
                if not _is_prepared(final):
                    raise
    return tfds.builder_from_directory(final)


def find(name: str, data_dir: str | None = None) -> ReadOnlyBuilder:
    """Finds a dataset that was prepared before.

    Args:
        name: Its name, as TensorFlow Datasets has it: `mnist`, `mnist:3.0.1`, `glue/cola`.
        data_dir: The folder of prepared datasets; the default is that of TensorFlow Datasets.

    Returns:
        The builder that reads the prepared files.

    Raises:
        DatasetNotPreparedError: It is not there.
        ValueError: That is no name of a dataset.

    Example:
        >>> find("mnist").as_dataset(split="train", as_supervised=True)  # doctest: +SKIP
    """
    try:
        return builder_from_files(name, data_dir=data_dir)
    except tfds.core.DatasetNotFoundError as error:
        # Whatever prepares the dataset must put it where this search looks.
        remedy = f"tfds build {name}" + (f" --data_dir={data_dir}" if data_dir else "")
        if name == "fashion_mnist":
            offline = "python examples/fashion_mnist.py" + (f" --data-dir={data_dir}" if data_dir else "")
            remedy = f"{offline} (no network needed), or {remedy}"
        folder = data_dir or tfds.core.constants.DATA_DIR
        raise DatasetNotPreparedError(
            f"the dataset {name!r} is not prepared: nothing was found in {os.path.join(folder, name)}. "
            f"Prepare it first: {remedy}"
        ) from error


def _is_prepared(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "dataset_info.json"))
