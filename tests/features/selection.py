"""Rows of the feature table that stand for all where the table takes long; the rest is for `make test-all`."""

from __future__ import annotations

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
# On two devices of one process: one row where several have the same in common, such as an optimizer with slots.
ON_TWO_DEVICES = (
    "numpy arrays",
    "tf.data, shuffled with a seed",
    "sample_weight",
    "last batch uneven (90 rows)",
    "one row in all",
    "metrics of all kinds",
    "BatchNormalization",
    "L2 regularisation and constraints",
    "loss reduced by sum",
    "AdamW, weight decay, EMA",
    "gradient_accumulation_steps",
    "steps_per_execution, uneven",
    "run_eagerly",
    "mixed_float16",
    "Embedding and Adam (sparse gradients)",
    "masked sequences, a loss per time step",
    "dict inputs, several outputs and losses",
    "Python generator (no batch is lost)",
    "BatchNormalization in a custom train_step, uneven",
    "metrics that a train_step logs under other names",
    "two optimizers in a train_step (GAN)",
    "ragged input",
    "train_on_batch, test_on_batch, predict_on_batch",
)
# In several processes: what depends on who holds which rows, and on what is exchanged.
IN_PROCESSES = (
    "numpy arrays",
    "tf.data, shuffled with a seed",
    "last batch of one row (81 rows)",
    "metrics of all kinds",
    "BatchNormalization",
    "clipnorm",
    "gradient_accumulation_steps",
    "steps_per_execution, uneven",
    "Embedding and Adam (sparse gradients)",
    "dict inputs, several outputs and losses",
    "Python generator (no batch is lost)",
    "custom train_step, written for one process",
)
