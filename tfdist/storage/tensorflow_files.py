"""Files of every file system that TensorFlow has: `gs://` comes with it, others with packages such as tensorflow-io."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
from collections.abc import Iterator

import tensorflow as tf

from tfdist.cluster.foreign_text import cleaned
from tfdist.storage.base import MOST, Storage


class TensorFlowStorage(Storage):
    """Paths with a scheme that `tf.io.gfile` knows.

    What it does is copying and `glob` alone, for these say what has failed. `listdir` and `isdir` answer a bucket that
    cannot be listed like one that is empty; and where a `GFile` could not be written, TensorFlow tries again for
    minutes as it is thrown away, and meanwhile no other thread of Python runs.
    """

    def names(self, folder: str, levels: int = 1) -> list[str]:
        try:
            with os_errors():
                found = tf.io.gfile.glob(f"{glob.escape(folder)}{'/*' * levels}")
        except FileNotFoundError:
            return []
        return [path.removeprefix(f"{folder}/") for path in found if not path.endswith("/")]

    def download(self, path: str, local: str) -> None:
        with os_errors():
            tf.io.gfile.copy(path, local, overwrite=True)

    def upload(self, local: str, path: str) -> None:
        with os_errors():
            if not _has_folders(path):
                tf.io.gfile.copy(local, path, overwrite=True)
                return
            tf.io.gfile.makedirs(os.path.dirname(path))
            part = f"{path}.part-{secrets.token_hex(4)}"
            tf.io.gfile.copy(local, part)
            tf.io.gfile.rename(part, path, overwrite=True)

    def remove(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError), os_errors():
            tf.io.gfile.remove(path)

    def remove_all(self, folder: str) -> None:
        if _has_folders(folder):
            with contextlib.suppress(FileNotFoundError), os_errors():
                tf.io.gfile.rmtree(folder)
        else:
            super().remove_all(folder)


def is_known(scheme: str) -> bool:
    """Whether TensorFlow has a file system of this scheme; no request is sent."""
    return scheme in tf.io.gfile.get_registered_schemes()


def _has_folders(path: str) -> bool:
    """Whether folders have to be made, and files appear before they are complete: not so in a bucket.

    There a folder would be an empty object, at eight requests each, and renaming would be copying.
    """
    return not path.startswith("gs://")


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Turns TensorFlow's errors about files into the `OSError` that Python's own functions raise."""
    try:
        yield
    except tf.errors.NotFoundError as error:
        raise FileNotFoundError(_cause(error)) from error
    except (tf.errors.PermissionDeniedError, tf.errors.UnauthenticatedError) as error:
        raise PermissionError(_cause(error)) from error
    except tf.errors.OpError as error:
        raise OSError(_cause(error)) from error


def _cause(error: tf.errors.OpError) -> str:
    """Returns an error's message without the names of TensorFlow's internal functions, fit to be printed."""
    message = re.sub(r"^\{\{function_node [^}]*\}\} | \[Op:\w+\].*$", "", error.message, flags=re.DOTALL)
    return cleaned(" ".join(message.split()), MOST)
