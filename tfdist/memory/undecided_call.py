"""Stands in for the `call` of a model with mode "auto", until it is known how large batches are."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import keras
from keras.src import tree
from tensorflow.python.eager import record

from tfdist.memory.policy import MemoryPolicy

_log = logging.getLogger("tfdist")


class UndecidedCall:
    """Keeps everything, and says once that it does where a model is trained by something else than Keras.

    Args:
        model: the model.
        policy: with mode "auto".
    """

    def __init__(self, model: keras.Model, policy: MemoryPolicy):
        self.policy, self._model, self._told = policy, weakref.ref(model), False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        symbolic = any(map(keras.backend.is_keras_tensor, tree.flatten((args, kwargs))))
        if not symbolic and record.could_possibly_record() and not self._told:
            self._told = True
            _log.warning(
                "Model '%s' has mode 'auto', and is called under a tape outside of its own fit and train_on_batch, "
                "which would tell how large batches are: everything is kept. Choose and apply: "
                "choice = tfdist.memory.choose(model, batch_size, policy); tfdist.memory.apply(model, choice.policy).",
                model.name,
            )
        return type(model).call(model, *args, **kwargs)
