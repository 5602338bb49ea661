"""Each row of the tables in docs/what-is-exact.md is held by tests that exist, or is marked as one that is not."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.unit.pages import ROOT, read

PAGE = "docs/what-is-exact.md"
# Ends the first cell of a row that no test holds.
MARK = " °"
RANDOMNESS, GUARDS = "tests/cluster/test_randomness.py", "tests/logical/test_guards.py"
EQUALITY, SERVERS = "tests/parameter_server/test_equality.py", "tests/parameter_server/test_asynchronous.py"
LAYER_STATE = "tests/logical/test_layer_state.py"
STATE = "state that layers and a train_step keep (centre, counts, momentum encoder, memory bank)"
MISTAKES = "tests/cluster/test_mistakes.py"

# The beginning of each row, and what holds it: rows of the feature table, and test functions.
EVIDENCE = {
    "a batch that does not divide over the replicas": ["last batch uneven (90 rows)"],
    "a last batch with fewer rows than replicas": ["last batch of one row (81 rows)", "last batch of one row, tf.data"],
    "masked time steps": [
        "masked sequences, a loss per time step",
        "loss reduced by mean_with_sample_weight",
        "loss reduced by sum",
    ],
    "`clipnorm`": ["clipnorm", "global_clipnorm", "clipvalue"],
    "`mixed_float16`": ["mixed_float16"],
    "`gradient_accumulation_steps`": ["gradient_accumulation_steps"],
    "`BatchNormalization`": ["BatchNormalization", "BatchNormalization of data far from zero"],
    "`Dropout` and other layers": [f"{RANDOMNESS}::test_dropout_masks_differ_between_replicas"],
    "`steps_per_execution`": ["steps_per_execution", "steps_per_execution, uneven"],
    "a Python generator": ["Python generator (no batch is lost)"],
    "state that layers or a `train_step` keep": [STATE, f"{LAYER_STATE}::test_what_replicas_compute_alike_is_not_sent"],
    "`add_weight(aggregation=)` of such state": [
        STATE,
        f"{LAYER_STATE}::test_equals_one_process_with_batches_that_do_not_divide",
        f"{LAYER_STATE}::test_the_first_replicas_value",
    ],
    "state that is made of rows in another way": [
        f"{LAYER_STATE}::test_what_cannot_equal_one_process_is_warned_of_once",
        f"{LAYER_STATE}::test_rows_of_all_replicas",
    ],
    "`keras.metrics.Sum` in a custom": ["tests/logical/test_layer_state.py::test_sums_that_a_step_counts"],
    "a `train_step` written for one process": [
        "custom train_step, written for one process",
        "BatchNormalization in a custom train_step, uneven",
        f"{GUARDS}::test_one_of_two_losses_is_scaled",
    ],
    "metrics that a `train_step` logs": [
        "metrics that a train_step logs under other names",
        "metrics and other values in the logs of a train_step",
        "loop over self.metrics in a train_step (nested logs)",
    ],
    "`train_on_batch`": ["train_on_batch, test_on_batch, predict_on_batch"],
    "`predict_on_batch`": ["train_on_batch, test_on_batch, predict_on_batch"],
    "shuffling in `fit`": [
        f"{RANDOMNESS}::test_ranks_with_seeds_of_their_own_equal_one_process_with_the_chiefs",
        f"{RANDOMNESS}::test_every_row_is_seen_once_an_epoch",
    ],
    "a metric function that returns": ["metric functions that return one value a batch"],
    "`TerminateOnNaN`": ["tests/cluster/test_terminate_on_nan.py::test_all_processes_stop"],
    "several workers, one path": [
        "tests/cluster/test_callbacks.py::test_callbacks_write_on_the_chief_alone",
        "tests/cluster/test_saving.py::test_chief_alone_writes_formats",
    ],
    "multi-worker `fit`": ["tests/cluster/test_features.py::test_equals_one_process"],
    "sums of floats": [f"{RANDOMNESS}::test_all_replicas_end_with_the_same_bits"],
    "Dropout masks": [f"{RANDOMNESS}::test_first_replica_has_the_masks_of_one_process"],
    "logs of a custom `train_step`": [
        "metrics and other values in the logs of a train_step",
        "loop over self.metrics in a train_step (nested logs)",
    ],
    '<a id="input"></a>`AutoShardPolicy.FILE`': [
        "tests/cluster/test_sharding.py::test_every_row_is_seen_once_an_epoch",
        f"{MISTAKES}::test_shards_of_the_users_own",
    ],
    "`activity_regularizer`": ["activity_regularizer"],
    "`compression=PowerSGD(rank)`, `TopK(fraction)`": [
        "tests/logical/test_compression.py::test_power_sgd_is_that_of_the_whole_gradient",
        "tests/logical/test_compression.py::test_top_k_equals_by_hand",
        "tests/logical/test_compression.py::test_nothing_is_lost",
        "tests/cluster/test_compression.py::test_equals_by_hand",
    ],
    '`compression="bf16"`, `"fp16"`': [f"{GUARDS}::test_rounding_is_within_its_bound_and_not_exact"],
    '`batch_norm="local"`': [f"{GUARDS}::test_local_batch_norm"],
    '`mode="sync"`': [
        f"{EQUALITY}::test_synchronous",
        f"{EQUALITY}::test_each_shard_has_its_own_dropout_mask",
        "tests/parameter_server/test_features.py::test_synchronous_training_equals_one_process",
    ],
    '`mode="async"`, `max_inflight=1`': [
        f"{EQUALITY}::test_one_execution_at_a_time",
        "tests/parameter_server/test_features.py::test_one_execution_at_a_time_equals_one_process",
    ],
    '`mode="async"` |': [
        f"{EQUALITY}::test_asynchronous_training_is_not_equal",
        f"{SERVERS}::test_counters_are_exact",
        f"{SERVERS}::test_metrics_that_are_sums_and_one_that_is_not",
    ],
    "metrics whose state is not a sum": [f"{SERVERS}::test_metrics_that_are_sums_and_one_that_is_not"],
    "`tfdist.optimizers.LazyAdam`": [
        "tests/logical/test_lazy_adam.py::test_against_numpy",
        "tests/logical/test_lazy_adam.py::test_is_adam_where_every_row_has_a_gradient",
    ],
    "a model, metric or optimizer created outside": [
        f"{GUARDS}::test_optimizer_created_outside",
        f"{GUARDS}::test_metric_created_outside",
        f"{GUARDS}::test_layer_created_outside",
        f"{MISTAKES}::test_a_model_without_a_scope_is_warned_of_once",
    ],
    "a compiled loss that mixes rows": ["tests/logical/test_row_mixing.py::test_losses_that_mix_rows"],
    "`stateful=True`": ["tests/logical/test_guards.py::test_stateful_layers"],
    "a dataset with `deterministic=False`": ["tests/cluster/test_order_of_data.py::test_no_order"],
    "a `train_step` that is not a plain method": [
        "tests/logical/test_step_refusals.py::test_a_step_that_is_no_method",
        "tests/logical/test_step_refusals.py::test_an_optimizer_that_is_no_attribute_of_the_model",
    ],
    "float8 layers": [f"{GUARDS}::test_float8"],
    "datasets of different (known) size": [
        f"{MISTAKES}::test_other_number_of_batches",
        f"{MISTAKES}::test_other_components",
        f"{MISTAKES}::test_other_number_of_rows",
        f"{RANDOMNESS}::test_datasets_that_shuffle_differently_are_refused",
    ],
}


def rows() -> list[str]:
    """The rows of all tables, without the bar before the first cell."""
    lines = re.findall(r"^\| (.+)$", read(PAGE), re.MULTILINE)
    return [line for line in lines if not line.startswith(("Case |", "Received |"))]


def evidence(row: str) -> list[str]:
    """Of the longest beginning that fits."""
    beginnings = [beginning for beginning in EVIDENCE if row.startswith(beginning)]
    return EVIDENCE[max(beginnings, key=len)] if beginnings else []


@functools.cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.split(" |")[0])
def test_a_row_has_tests_or_the_mark(row):
    marked = row.split(" |")[0].endswith(MARK)
    assert marked != bool(evidence(row))


def test_the_tests_exist():
    from tests.features.table import FEATURES

    for name in {name for names in EVIDENCE.values() for name in names}:
        path, _, function = name.partition("::")
        assert function in functions(path) if function else name in FEATURES, name


def test_every_beginning_is_that_of_a_row():
    assert len(rows()) > 40
    for beginning in EVIDENCE:
        assert any(row.startswith(beginning) for row in rows()), beginning
