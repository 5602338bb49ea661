"""Adam that updates only the rows of an embedding that a batch has used."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.steps.gradients import sum_duplicates


@keras.saving.register_keras_serializable(package="tfdist")
class LazyAdam(keras.optimizers.Adam):
    """`keras.optimizers.Adam` for large embeddings: rows without a gradient keep their values and moments.

    Adam changes every row of a table in every step, as all moments decay. Here a row is updated, and its moments
    decay, only in steps in which the row was used, so a step costs as much as the rows of its batch. Variables with
    ordinary gradients (all but embeddings) are updated as by Adam; a table of which every step uses every row, too.

    `clipnorm`, `clipvalue` and `global_clipnorm` work, on the sum of the gradients of each row (Keras' own optimizers
    clip the parts of the gradient of a row that occurs several times one by one).

    Args:
        learning_rate: as in `keras.optimizers.Adam`.
        beta_1: as in `keras.optimizers.Adam`.
        beta_2: as in `keras.optimizers.Adam`.
        epsilon: as in `keras.optimizers.Adam`.
        amsgrad: as in `keras.optimizers.Adam`.
        **kwargs: as in `keras.optimizers.Adam`, except for `use_ema`, `gradient_accumulation_steps` and
            `loss_scale_factor`.

    Raises:
        ValueError: for the arguments named above, which touch every row in every step or do not work with
            `tf.IndexedSlices`; while training, if `weight_decay` is set and an embedding is not excluded from it.

    Example:
        >>> import keras, tfdist.layers, tfdist.optimizers
        >>> model = keras.Sequential([tfdist.layers.ShardedEmbedding(1000, 8), keras.layers.Dense(1)])
        >>> model.compile(tfdist.optimizers.LazyAdam(0.01), "mse")
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        **kwargs: Any,
    ) -> None:
        reasons = {
            "use_ema": "averages every row in every step",
            "gradient_accumulation_steps": "adds gradients up in a table, in which every row has a gradient",
            "loss_scale_factor": "divides gradients in a way that tf.IndexedSlices do not support",
        }
        for argument, reason in reasons.items():
            if kwargs.get(argument):
                raise ValueError(
                    f"Received: LazyAdam with {argument}={kwargs[argument]!r}, which {reason}. "
                    f"Expected: no {argument}, or keras.optimizers.Adam."
                )
        super().__init__(learning_rate, beta_1, beta_2, epsilon, amsgrad, **kwargs)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Updates one variable; with `tf.IndexedSlices`, the rows that they have.

        Raises:
            ValueError: if the rows decay, see `weight_decay`.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            super().update_step(gradient, variable, learning_rate)
            return
        if self.weight_decay is not None and self._use_weight_decay(variable):
            raise ValueError(
                f"Received: LazyAdam with weight_decay={self.weight_decay} for '{variable.name}', of which a step uses "
                "only some rows, while the decay changes all of them in every step. Expected: no weight_decay, or "
                '`optimizer.exclude_from_weight_decay(var_names=["embeddings"])` before training.'
            )
        # Adam's formulas on the rows of the batch. Moments and weights are read by `gather` and written by scatters, on
        # the device of each variable: no operation touches the whole table.
        dtype = variable.dtype
        gradient = sum_duplicates(gradient)
        rows, values = gradient.indices, tf.cast(gradient.values, dtype)
        step = tf.cast(self.iterations + 1, dtype)
        beta_1, beta_2 = tf.cast(self.beta_1, dtype), tf.cast(self.beta_2, dtype)
        alpha = tf.cast(learning_rate, dtype) * tf.sqrt(1 - beta_2**step) / (1 - beta_1**step)
        index = self._get_variable_index(variable)

        m = self._momentums[index].value
        m_rows = tf.gather(m, rows)
        m_rows += (values - m_rows) * (1 - self.beta_1)
        self.assign(m, tf.IndexedSlices(m_rows, rows))
        v = self._velocities[index].value
        v_rows = tf.gather(v, rows)
        v_rows += (tf.square(values) - v_rows) * (1 - self.beta_2)
        self.assign(v, tf.IndexedSlices(v_rows, rows))
        if self.amsgrad:
            v_hat = self._velocity_hats[index].value
            v_rows = tf.maximum(tf.gather(v_hat, rows), v_rows)
            self.assign(v_hat, tf.IndexedSlices(v_rows, rows))
        self.assign_sub(variable, tf.IndexedSlices(m_rows * alpha / (tf.sqrt(v_rows) + self.epsilon), rows))

    def _clip_gradients(self, grads: list) -> list:
        if not (self.clipnorm or self.clipvalue or self.global_clipnorm):
            return grads
        grads = [sum_duplicates(grad) if isinstance(grad, tf.IndexedSlices) else grad for grad in grads]
        if self.global_clipnorm:
            # Keras' own function would turn `tf.IndexedSlices` into whole tables.
            return tf.clip_by_global_norm(grads, self.global_clipnorm)[0]
        return super()._clip_gradients(grads)
