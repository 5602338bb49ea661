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
# On two devices of one process: what the same strategies do in several processes is not repeated.
ON_TWO_DEVICES = (
    "numpy arrays",
    "sample_weight",
    "one row in all",
    "loss reduced by sum",
    "run_eagerly",
    "mixed_float16",
    "BatchNormalization in a custom train_step, uneven",
    "two optimizers in a train_step (GAN)",
    "train_on_batch, test_on_batch, predict_on_batch",
)
# In several processes: what depends on who holds which rows, and on what is exchanged.
IN_PROCESSES = (
    "numpy arrays",
    "last batch of one row (81 rows)",
    "metrics of all kinds",
    "BatchNormalization",
    "clipnorm",
    "Embedding and Adam (sparse gradients)",
    "dict inputs, several outputs and losses",
    "Python generator (no batch is lost)",
)
