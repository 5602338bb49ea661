"""Rows of the feature table that stand for all where the table takes long; the rest is for `make test-all`."""

from __future__ import annotations

from tests.features.table import FEATURES

# What differs in how it is exchanged: sums, statistics, slices, branches, loops, shares that are empty.
EXCHANGES = (
    "numpy arrays",
    "last batch of one row (81 rows)",
    "BatchNormalization",
    "Adam",
    "clipnorm",
    "gradient_accumulation_steps",
    "steps_per_execution, uneven",
    "mixed_float16",
    "Embedding and Adam (sparse gradients)",
)
# Besides, one of each kind of data, metrics, losses, steps and predictions.
ONE_OF_EACH_KIND = (
    *EXCHANGES,
    "tf.data, shuffled with a seed",
    "sample_weight",
    "validation arrays of another size",
    "last batch of one row, tf.data",
    "batch size odd",
    "one row in all",
    "metrics of all kinds",
    "L2 regularisation and constraints",
    "loss reduced by sum",
    "AdamW, weight decay, EMA",
    "steps_per_execution",
    "run_eagerly",
    "mixed_bfloat16",
    "masked sequences, a loss per time step",
    "dict inputs, several outputs and losses",
    "Python generator (no batch is lost)",
    "custom train_step, written for one process",
    "BatchNormalization in a custom train_step, uneven",
    "metrics and other values in the logs of a train_step",
    "two optimizers in a train_step (GAN)",
    "ragged input",
)
REST = tuple(name for name in FEATURES if name not in ONE_OF_EACH_KIND)
