"""Rows of the feature table that stand for all where the table takes long; the rest is for `make nightly`."""

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
    "batches of 5 and of 3 rows, plain SGD",
    "loss reduced by sum",
    "Embedding and SGD (sparse gradients), uneven",
    "BatchNormalization in a custom train_step, uneven",
    "float64, uneven",
    "train_on_batch, test_on_batch, predict_on_batch",
    "numbers that a train_step and a test_step compute from metrics",
    "global_sum in compute_loss and add_loss, uneven",
)
# In several processes: what depends on who holds which rows, and on what is exchanged.
IN_PROCESSES = (
    "batches of 5 and of 3 rows, plain SGD",
    "BatchNormalization",
    "Embedding and SGD (sparse gradients), uneven",
)
# Where a row takes seconds, others stand for these: as they are, they are run on two devices of one process only.
VARIANTS = (
    "tf.data, shuffled with a seed",
    "numpy arrays, shuffled by fit",
    "validation_split",
    "L2 regularisation and constraints",
    "global_clipnorm",
    "clipvalue",
    "activity_regularizer",
    "metrics that a train_step logs under other names",
    "metric functions that return one value a batch",
    "BatchNormalization of data far from zero",
    "all_gather in the loss of a train_step (simclr)",
)
# Over transports and under strategies that have the steps of another one, which are tested there.
AGAIN = (
    "AdamW, weight decay, EMA",
    "BatchNormalization",
    "dict inputs, several outputs and losses",
    "two optimizers in a train_step (GAN)",
    "state that layers and a train_step keep (centre, counts, momentum encoder, memory bank)",
    "labelled and unlabelled rows, of other numbers, in one batch (FixMatch)",
    "ragged input",
    "sparse input",
    "Python generator (no batch is lost)",
    "all_gather in the loss of a train_step (clip)",
    "numbers that a train_step and a test_step compute from metrics",
    "tf.Variables that layers and a train_step assign",
    "a Transformer's block, padded batches",
    "CTC",
)
# Where `evaluate` and `predict` are compared, too: in the others they do what they do in one of these.
WHOLE = (
    "numpy arrays",
    "tf.data, repeat and steps_per_epoch",
    "sample_weight",
    "validation dataset, uneven",
    "validation_split",
    "last batch of one row (81 rows)",
    "one row in all",
    "metrics of all kinds",
    "steps_per_execution, uneven",
    "run_eagerly",
    "masked sequences, a loss per time step",
    "dict inputs, several outputs and losses",
    "PyDataset",
    "Python generator (no batch is lost)",
    "two optimizers in a train_step (GAN)",
    "labelled and unlabelled rows, of other numbers, in one batch (FixMatch)",
    "state that layers and a train_step keep (centre, counts, momentum encoder, memory bank)",
    "a train_step without call, layers built in it (as in Keras' VAE and DCGAN examples)",
    "ragged input",
    "sparse input",
    "distribute_datasets_from_function",
    "numbers that a train_step and a test_step compute from metrics",
    "tf.Variables that layers and a train_step assign",
    "TextVectorization and ragged.to_tensor without a length, unmasked",
    "all_gather in the loss of a train_step (clip)",
)
