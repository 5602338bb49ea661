"""Texts by name in TensorFlow's coordination service, which runs in the chief of a multi-worker job."""

from __future__ import annotations

import contextlib

import tensorflow as tf

from tfdist.cluster.key_value import ProcessGoneError
from tfdist.compat.upstream import context

# For what is there already.
_SECONDS = 60.0


class CoordinationStore:
    """The texts that the processes of a job keep for each other; see `tfdist.cluster.key_value` for another kind."""

    def set(self, name: str, text: str) -> None:
        """Keeps a text under a name that was never used before.

        Raises:
            ConnectionError: if the chief is gone.
        """
        try:
            context.context().set_config_key_value(name, text)
        except tf.errors.UnavailableError as error:
            raise ConnectionError(error.message) from None

    def decide(self, name: str, text: str) -> str:
        """As `KeyValueServer.decide`."""
        with contextlib.suppress(tf.errors.AlreadyExistsError):
            self.set(name, text)
            return text
        return self.get(name, _SECONDS)

    def delete(self, name: str) -> None:
        """Forgets a text that nobody needs any more.

        Raises:
            ConnectionError: if the chief is gone.
        """
        try:
            context.context().delete_config_key_value(name)
        except tf.errors.NotFoundError:
            pass
        except tf.errors.UnavailableError as error:
            raise ConnectionError(error.message) from None

    def get(self, name: str, seconds: float, of: int | None = None) -> str | None:
        """The text of that name, once there is one; `None` if there is none within `seconds`.

        TensorFlow ends a step when one of the processes is gone, but not this wait, unless the chief is.

        Raises:
            ConnectionError: if the chief is gone; a `ProcessGoneError` if it was to set the text.
        """
        try:
            return context.context().get_config_key_value(name, max(1, int(1000 * seconds)))
        except (tf.errors.DeadlineExceededError, tf.errors.NotFoundError):
            return None
        except tf.errors.UnavailableError as error:
            raise (ProcessGoneError if of == 0 else ConnectionError)(error.message) from None
