"""An embedding whose table is split: over several variables, one for each parameter server, or over replicas by rows.

The shards' initial values need care. An initializer that is called once for each shard would be wrong twice: a Keras
initializer with a seed returns the same numbers each time, so that all shards would begin with the same rows; and one
that scales by the shape (`"glorot_uniform"`) would see the shape of a shard.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.compat.keras import save_as
from tfdist.layers.sharded_table import (
    ShardedTable,
    TableInitializer,
    making_table,
    mark_shards,
    rows_of_shard,
    saved_form,
)

# The largest table that is drawn as a whole, in bytes. Larger ones are drawn shard by shard where that is possible.
WHOLE_TABLE_LIMIT = 2**30

# Initializers whose values do not depend on the shape.
_SHAPELESS = (keras.initializers.RandomUniform, keras.initializers.RandomNormal, keras.initializers.TruncatedNormal)


def shard_initializers(initializer: Callable, rows: int, width: int, shards: int) -> list[Callable]:
    """Returns an initializer for each shard of a table of shape (rows, width).

    Put together, the shards have the values that `initializer` gives to the whole table. A table of more than
    `WHOLE_TABLE_LIMIT` bytes (float32) is not drawn as a whole if the initializer is a random uniform, normal or
    truncated normal one: then each shard has a seed of its own, and the values depend on the number of shards.
    """
    if shards == 1:
        return [initializer]
    if 4 * rows * width > WHOLE_TABLE_LIMIT and type(initializer) in _SHAPELESS:
        return [_reseeded(initializer, shard) for shard in range(shards)]
    whole = _Whole(initializer, rows, shards)
    return [functools.partial(whole.draw, shard) for shard in range(shards)]


def _reseeded(initializer: Any, shard: int) -> Callable:
    if not isinstance(initializer.seed, int):
        return initializer  # A SeedGenerator moves on from call to call.
    seed = random.Random(f"{initializer.seed}/{shard}").getrandbits(31)
    return type(initializer)(**{**initializer.get_config(), "seed": seed})


class _Whole:
    """Draws the whole table when the first shard is initialized, and frees it after the last one."""

    def __init__(self, initializer: Callable, rows: int, shards: int) -> None:
        self._initializer, self._rows, self._shards = initializer, rows, shards
        self._table: np.ndarray | None = None
        self._missing: set[int] = set()

    def draw(self, shard: int, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        """The rows of one shard. Called by Keras with the shape of the shard."""
        if self._table is None or shard not in self._missing:
            # A model without an Input is built while Keras traces it: the table must not be drawn in that graph.
            with tf.init_scope():
                table = self._initializer((self._rows, *shape[1:]), dtype=dtype)
            self._table = keras.ops.convert_to_numpy(table)
            self._missing = set(range(self._shards))
        part = self._table[shard :: self._shards]
        self._missing.discard(shard)
        if not self._missing:
            self._table = None
        return keras.ops.convert_to_tensor(part, dtype=dtype)


# Constraints on the norm of a vector. With axis=0 the vector is a column, whose rows are in different shards.
_BY_COLUMN = (keras.constraints.MaxNorm, keras.constraints.MinMaxNorm, keras.constraints.UnitNorm)


@keras.saving.register_keras_serializable(package="tfdist", name="ShardedEmbedding")
class ShardedEmbedding(keras.layers.Layer):
    """`keras.layers.Embedding` with a table that may be spread over machines.

    Under `ParameterServerStrategy`, and with `shards=`, it has several variables: row i of the table is row `i //
    shards` of variable number `i % shards`. Under `MultiWorkerMirroredStrategy` and `FullyShardedStrategy` it has one,
    of which each replica keeps as many rows, with what the optimizer keeps for them; all rows, if it is built with
    `trainable=False`. There a step sends ids, the rows that these name, and their gradients, each to all replicas.

    A lookup reads only the rows that it needs, and gradients are `tf.IndexedSlices` of the rows used. Results are those
    of `keras.layers.Embedding`, including errors for ids outside the table (on a CPU; the message may name the row of a
    shard, not the id).

    Files (`.keras`, `.weights.h5`) hold the whole table and, for each of them, the whole table of what the optimizer
    keeps, so that they load into any number of shards and into `keras.layers.Embedding`, and the other way round.
    `get_weights` of the layer gives the whole table, too, but `get_weights` of a model, and files in the old `.h5`
    format, hold the shards. Optimizers that keep something else than one value
    for each weight (`keras.optimizers.Adafactor`) can be loaded into the same number of shards only; otherwise Keras
    warns and restarts them at 0.

    What works on a whole variable works on each shard: `clipnorm`, and optimizers that use the norm of a variable
    (`Lamb`, `Adafactor`), give other numbers than with one shard.

    Initial values are those of `keras.layers.Embedding` with the same seed, except for tables of more than 1 GiB with
    a uniform or normal initializer: these are drawn shard by shard, and depend on the number of shards.

    Args:
        input_dim: number of rows.
        output_dim: length of a row.
        embeddings_initializer: as in `keras.layers.Embedding`.
        embeddings_regularizer: applied to each shard, and the results are added. It reads the whole table and makes its
            gradient dense in every step.
        embeddings_constraint: applied to each shard, so it must treat every row by itself (norms: `axis=1`). It reads
            and writes the whole table in every step.
        mask_zero: whether id 0 is padding, which later layers should mask.
        weights: initial values, an array of shape (input_dim, output_dim).
        shards: number of variables; at most `input_dim`. `None` for the number of parameter servers of the strategy in
            whose scope the layer is built (1 without one).
        **kwargs: as for every Keras layer (`name`, `dtype`, `trainable`).

    Raises:
        ValueError: if `input_dim`, `output_dim` or `shards` is not a positive integer; when it is built with several
            shards, if the constraint or regularizer is one of Keras' that combines different rows.

    Example:
        >>> import numpy as np, tfdist.layers
        >>> layer = tfdist.layers.ShardedEmbedding(1000, 64, shards=2)
        >>> layer(np.array([[4, 20]])).shape
        TensorShape([1, 2, 64])
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        weights: Any = None,
        shards: int | None = None,
        **kwargs: Any,
    ) -> None:
        sizes = {"input_dim": input_dim, "output_dim": output_dim, "shards": 1 if shards is None else shards}
        for argument, value in sizes.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Received: {argument}={value!r}. Expected: a positive integer.")
        super().__init__(**kwargs)
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.mask_zero = mask_zero
        self.shards = shards
        self.supports_masking = mask_zero
        # Ids must not become float16 in mixed precision.
        self.autocast = False
        # XLA cannot compile `dynamic_partition`, which the lookup uses.
        self.supports_jit = False
        if weights is not None:
            self.build()
            self.set_weights(weights if isinstance(weights, list) and len(weights) == 1 else [weights])

    def build(self, input_shape: Any = None) -> None:
        """Creates the variables."""
        if self.built:
            return
        shards = self.shards or getattr(tf.distribute.get_strategy(), "num_ps", 1)
        shards = min(shards, self.input_dim)
        if shards > 1:
            self._check_row_wise()
        initializers = shard_initializers(self.embeddings_initializer, self.input_dim, self.output_dim, shards)
        # What is one variable, a strategy may deal out by rows.
        initializers = [TableInitializer(one) for one in initializers] if shards == 1 else initializers
        with making_table() if shards == 1 else contextlib.nullcontext():
            self._make(initializers)
        self.built = True

    def _make(self, initializers: Sequence[Callable]) -> None:
        shards = len(initializers)
        variables = [
            self.add_weight(
                shape=(rows_of_shard(self.input_dim, shards, shard), self.output_dim),
                initializer=initializer,
                name=f"embeddings_{shard}_of_{shards}" if shards > 1 else "embeddings",
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
                # In mixed precision, Keras would cast, and so read, the whole variable.
                autocast=False,
            )
            for shard, initializer in enumerate(initializers)
        ]
        self._table = ShardedTable(variables)
        if shards > 1:
            mark_shards(self._table)
            save_as(saved_form)

    def _check_row_wise(self) -> None:
        constraint, regularizer = self.embeddings_constraint, self.embeddings_regularizer
        if isinstance(constraint, _BY_COLUMN) and constraint.axis not in (1, -1, [1], [-1], (1,), (-1,)):
            raise ValueError(
                f"Received: embeddings_constraint={type(constraint).__name__} with axis={constraint.axis}, which "
                "combines different rows, and these are in different shards. Expected: axis=1, or shards=1."
            )
        if isinstance(regularizer, keras.regularizers.OrthogonalRegularizer):
            raise ValueError(
                "Received: embeddings_regularizer=OrthogonalRegularizer, which combines different rows, and these are "
                "in different shards. Expected: L1, L2 or L1L2, or shards=1."
            )

    def get_weights(self) -> list[np.ndarray]:
        """The table in row order, in a list; empty before the layer is built."""
        return [self._table.numpy()] if self.built else []

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Sets the table.

        Raises:
            ValueError: if `weights` is not a list of one array of the table's shape, or the layer is not built.
        """
        if not self.built or len(weights) != 1:
            raise ValueError(
                f"Received: {len(weights)} arrays for layer '{self.name}' ({'' if self.built else 'not yet '}built). "
                "Expected: one array, the table, after `layer.build()`."
            )
        self._table.assign(np.asarray(weights[0]))

    def call(self, inputs: Any) -> Any:
        """Looks up ids: a tensor or ragged tensor of integers, or a sparse one (missing ids are 0)."""
        if isinstance(inputs, tf.RaggedTensor):
            return inputs.with_flat_values(self.call(inputs.flat_values))
        inputs = keras.ops.convert_to_tensor(inputs, sparse=False)
        if inputs.dtype not in (tf.int32, tf.int64):
            inputs = tf.cast(inputs, tf.int32)
        # Negative ids count from the end, as in keras.ops.take.
        ids = tf.where(inputs < 0, inputs + self.input_dim, inputs)
        return tf.cast(self._lookup(ids), self.compute_dtype)

    def _lookup(self, ids: tf.Tensor) -> tf.Tensor:
        """Reads the rows of the ids.

        The ids are dealt out to the shards on the device of the replica (`dynamic_partition`). One `gather` for each
        shard runs where the variable is, on its parameter server, so that only these rows are sent. On the replica
        `dynamic_stitch` puts them into the order of the ids. The gradient of each shard is a `tf.IndexedSlices` of the
        rows that were read.
        """
        # `value` of a weight is the tf.Variable: `tf.gather` of it reads rows only, and not the whole table first.
        variables = [variable.value for variable in self._table.variables]
        shards = len(variables)
        if shards == 1:
            return tf.gather(variables[0], ids)
        flat = tf.reshape(ids, [-1])
        owners = tf.cast(flat % shards, tf.int32)
        rows = tf.dynamic_partition(flat // shards, owners, shards)
        positions = tf.dynamic_partition(tf.range(tf.size(flat)), owners, shards)
        found = tf.dynamic_stitch(positions, [tf.gather(v, r) for v, r in zip(variables, rows, strict=True)])
        found = tf.reshape(found, tf.concat([tf.shape(ids), [self.output_dim]], 0))
        found.set_shape([*ids.shape, self.output_dim])
        return found

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Where ids are not 0, if `mask_zero`."""
        return keras.ops.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: tuple) -> tuple:
        """The shape of the ids, and `output_dim`."""
        return (*input_shape, self.output_dim)

    def compute_output_spec(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Shape and dtype of the result. The base class would trace the lookup to find them."""
        shape = self.compute_output_shape(inputs.shape)
        return keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=getattr(inputs, "ragged", False))

    def save_own_variables(self, store: dict) -> None:
        """Stores the table under the key that `keras.layers.Embedding` uses."""
        if self.built:
            store["0"] = self._table.numpy()

    def load_own_variables(self, store: dict) -> None:
        """Loads the table.

        Raises:
            ValueError: if the file has no table for this layer, or one of another shape.
        """
        if not self.built:
            super().load_own_variables(store)  # It explains what to do.
            return
        if list(store.keys()) != ["0"]:
            raise ValueError(
                f"Received: {len(store.keys())} variables for layer '{self.name}'. Expected: 1, the table, as "
                "ShardedEmbedding and keras.layers.Embedding save it (without LoRA or quantization)."
            )
        self._table.assign(store["0"])

    def get_config(self) -> dict[str, Any]:
        """The arguments of the layer, except for `weights`."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
            "shards": self.shards,
        }


# Keras derives the path of a layer in a file from the name of its class: it becomes the path of an Embedding.
ShardedEmbedding.__name__ = "Embedding"
