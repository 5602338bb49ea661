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
ORDER = "tests/cluster/test_order_of_data.py"
EQUALITY, SERVERS = "tests/parameter_server/test_equality.py", "tests/parameter_server/test_asynchronous.py"
LAYER_STATE = "tests/logical/test_layer_state.py"
STATE = "state that layers and a train_step keep (centre, counts, momentum encoder, memory bank)"
SAME = "tests/cluster/test_same_weights.py"
MISTAKES = "tests/cluster/test_mistakes.py"
COMMON = "tests/logical/test_common_gradients.py"

# The beginning of each row, and what holds it: rows of the feature table, and test functions.
EVIDENCE = {
    "a batch that does not divide over the replicas": ["batches of 5 and of 3 rows, plain SGD"],
    "a last batch with fewer rows than replicas": ["last batch of one row (81 rows)"],
    "masked time steps": [
        "masked sequences, a loss per time step",
        "loss reduced by mean_with_sample_weight",
        "loss reduced by sum",
        "tests/logical/test_row_trial.py::test_a_loss_that_is_not_reduced",
    ],
    "`clipnorm`": ["clipnorm", "global_clipnorm", "clipvalue"],
    "`mixed_float16` with scaled": [
        "tests/logical/test_loss_scaling.py::test_overflow_is_that_of_the_batch",
        f"{EQUALITY}::test_overflow_is_that_of_the_batch",
    ],
    "`mixed_float16` loss": ["mixed_float16"],
    "`gradient_accumulation_steps`": ["gradient_accumulation_steps"],
    "`BatchNormalization`": ["BatchNormalization", "BatchNormalization of data far from zero"],
    "`Dropout` and other layers": [f"{RANDOMNESS}::test_dropout_masks_differ_between_replicas"],
    "`steps_per_execution`": ["steps_per_execution, uneven"],
    "a Python generator": ["Python generator (no batch is lost)"],
    "state that layers or a `train_step` keep": [
        STATE,
        f"{LAYER_STATE}::test_state_of_objects_that_are_no_layers",
        f"{LAYER_STATE}::test_a_learning_rate_that_a_step_sets",
    ],
    "`add_weight(aggregation=)` of such state": [
        STATE,
        f"{LAYER_STATE}::test_equals_one_process_with_batches_that_do_not_divide",
        f"{LAYER_STATE}::test_the_first_replicas_value",
    ],
    "state that is made of rows in another way": [
        f"{LAYER_STATE}::test_what_cannot_equal_one_process_is_warned_of_once",
        f"{LAYER_STATE}::test_rows_of_all_replicas",
    ],
    "a layer that pads or cuts to the longest": ["tests/logical/test_row_trial.py::test_the_longest_row_of_a_batch"],
    "a component of a batch that is for all": [
        "tests/logical/test_other_rows.py::test_anchors_beside_rows",
        f"{MISTAKES}::anchors_beside_rows",
        "labelled and unlabelled rows, of other numbers, in one batch (FixMatch)",
    ],
    "`keras.metrics.Sum` in a custom": [
        "tests/logical/test_layer_state.py::test_sums_that_a_step_counts",
        "tests/logical/test_row_trial.py::test_counts_of_a_batch",
    ],
    "a `train_step` written for one process": [
        "custom train_step, written for one process",
        "BatchNormalization in a custom train_step, uneven",
        f"{GUARDS}::test_one_of_two_losses_is_scaled",
        f"{GUARDS}::test_an_optimizer_that_applies_twice_after_one_scaled_loss",
    ],
    "metrics that a `train_step` logs": [
        "metrics that a train_step logs under other names",
        "numbers that a train_step and a test_step compute from metrics",
        "metrics and other values in the logs of a train_step",
    ],
    "tensors that `call` keeps on `self`": [
        f"{LAYER_STATE}::test_what_call_keeps_on_self_is_of_each_replica",
        f"{LAYER_STATE}::test_an_eager_step_counts_once",
    ],
    "`train_on_batch`": ["train_on_batch, test_on_batch, predict_on_batch"],
    "`TextVectorization` and": ["TextVectorization and ragged.to_tensor without a length, unmasked"],
    "`predict_on_batch`": ["train_on_batch, test_on_batch, predict_on_batch"],
    "`predict`, and `strategy.gather`": ["tests/cluster/test_as_one_process.py::values_that_are_predicted"],
    "outputs of `predict` without": [
        "tests/logical/test_predictions.py::test_equals_one_process",
        "tests/logical/test_predictions.py::test_a_maximum_over_the_batch_is_averaged_with_a_warning",
    ],
    "shuffling in `fit`": [
        f"{RANDOMNESS}::test_ranks_with_seeds_of_their_own_equal_one_process_with_the_chiefs",
        f"{RANDOMNESS}::test_every_row_is_seen_once_an_epoch",
    ],
    "a metric function that returns": ["metric functions that return one value a batch"],
    "fits in threads": [
        "tests/logical/test_threads.py::test_folds_in_threads_equal_folds_one_by_one",
        "tests/logical/test_threads.py::test_a_server_predicts_while_a_model_is_trained",
    ],
    "`TerminateOnNaN`": ["tests/cluster/test_as_one_process.py::terminate_on_nan"],
    "several workers, one path": [
        "tests/cluster/test_saving.py::callbacks_that_write",
        "tests/cluster/test_saving.py::all_formats",
    ],
    "multi-worker `fit`": ["tests/cluster/test_features.py::test_equals_one_process"],
    "sums of floats": [
        f"{SAME}::test_checks_between_epochs_name_both_of_two",
        "float64, uneven",
    ],
    "Dropout masks": [
        f"{RANDOMNESS}::test_first_replica_has_the_masks_of_one_process",
        f"{LAYER_STATE}::test_random_numbers_that_are_kept_are_those_of_one_process",
    ],
    "`keras.random` with a whole number": [
        "tests/logical/test_global_seeds.py::test_a_whole_number_as_seed_warns_once",
        "tests/logical/test_global_seeds.py::test_a_generator_and_initializers_do_not_warn",
    ],
    "logs of a custom `train_step` or": [
        "metrics and other values in the logs of a train_step",
        f"{GUARDS}::test_what_differs_in_a_step_is_warned_of_once",
    ],
    "a loss in a custom `train_step` that is": [f"{GUARDS}::test_what_differs_in_a_step_is_warned_of_once"],
    "a metric of your own class": [
        "tests/logical/test_row_trial.py::test_steps_that_do_not_train",
        "tests/logical/test_row_trial.py::test_a_maximum_of_all_rows_is_that_of_one_process",
    ],
    '<a id="input"></a>`AutoShardPolicy.FILE`': [
        "tests/cluster/test_as_one_process.py::shards_of_files",
        "tests/logical/test_dataset_order.py::test_one_process_has_nothing_to_shard",
        "tests/cluster/test_as_one_process.py::other_rows_on_each_worker",
        f"{MISTAKES}::shards_of_the_users_own",
        f"{MISTAKES}::shards_of_other_sizes",
        f"{MISTAKES}::functions_of_other_sizes",
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
        f"{EQUALITY}::test_a_variable_that_no_layer_has_is_refused",
        f"{EQUALITY}::test_rows_that_are_mixed_are_told",
        "tests/logical/test_parameter_server_parts.py::test_state_that_is_no_mean_is_told",
        "tf.Variables that layers and a train_step assign",
        "tests/parameter_server/test_features.py::test_synchronous_training_equals_one_process",
    ],
    '`mode="async"`, `max_inflight=1`': [
        f"{EQUALITY}::test_one_execution_at_a_time",
        "tests/parameter_server/test_features.py::test_one_execution_at_a_time_equals_one_process",
    ],
    "logs of a `train_step` or": [
        f"{SERVERS}::the_last_batch_is_logged",
        "metrics and other values in the logs of a train_step",
    ],
    '`mode="async"` |': [
        f"{EQUALITY}::test_asynchronous_training_is_not_equal",
        f"{SERVERS}::counters_are_exact",
        f"{SERVERS}::metrics_that_are_sums_and_one_that_is_not",
    ],
    "`metric.result()` in a `train_step` by which": [
        "tests/logical/test_parameter_server_parts.py::test_results_that_change_variables_give_a_warning"
    ],
    "metrics whose state is not a sum": [f"{SERVERS}::metrics_that_are_sums_and_one_that_is_not"],
    "`tfdist.optimizers.LazyAdam`": [
        "tests/logical/test_lazy_adam.py::test_against_numpy",
        "tests/logical/test_lazy_adam.py::test_is_adam_where_every_row_has_a_gradient",
    ],
    "a model, or an instance of a metric or optimizer, created outside": [
        f"{GUARDS}::test_made_outside",
        f"{MISTAKES}::a_model_without_a_scope",
    ],
    "losses that divide by what the whole batch has": [
        "global_sum in compute_loss and add_loss, uneven",
        "tests/logical/test_row_trial.py::test_steps_that_mix_rows",
    ],
    "layers that mix rows": [
        "tests/logical/test_row_trial.py::test_steps_that_mix_rows",
        "tests/logical/test_row_trial.py::test_steps_that_do_not",
        "tests/logical/test_row_trial.py::test_steps_that_do_not_train",
        "tests/cluster/test_as_one_process.py::steps_that_mix_rows",
    ],
    "`keras.metrics.Mean` in a custom": ["tests/logical/test_row_trial.py::test_counts_of_a_batch"],
    "a compiled loss that mixes rows": ["tests/logical/test_row_trial.py::test_steps_that_mix_rows"],
    "`stateful=True`": ["tests/logical/test_guards.py::test_stateful_layers"],
    "a dataset without an order": [f"{ORDER}::test_every_row_is_seen_once_an_epoch"],
    "on several workers, a dataset whose rows come": [f"{ORDER}::test_every_row_is_seen_once_an_epoch"],
    "a `train_step` that is not a plain method": [
        "tests/logical/test_step_refusals.py::test_a_step_that_is_no_method",
        "tests/logical/test_step_refusals.py::test_an_optimizer_that_is_no_attribute_of_the_model",
    ],
    "weights of which a process": [f"{SAME}::test_a_rank_that_differs_in_one_bit_is_named"],
    "calls of `fit`, `evaluate`": [f"{SAME}::test_models_in_another_order_and_a_second_thread_are_told_by_name"],
    "layers that Python leaves out": [
        f"{COMMON}::test_equals_one_process",
        "tests/cluster/test_as_one_process.py::layers_that_python_leaves_out",
    ],
    "layers that exchange something": [f"{COMMON}::test_layers_that_exchange_statistics_are_refused"],
    "a metric's state that is assigned": ["tests/logical/test_metric_sums.py::test_no_count_is_lost"],
    "another model, `compile` or `fit`": [
        f"{MISTAKES}::other_programs",
        f"{MISTAKES}::the_same_program_under_other_names",
    ],
    "data that differ on a process": ["tests/cluster/test_same_data.py::other_rows"],
    "an optimizer that draws random numbers": [
        "tests/logical/test_global_seeds.py::test_an_optimizer_that_draws_with_tf_random_is_refused",
        "tests/logical/test_global_seeds.py::test_an_optimizer_draws_the_same_on_all_replicas",
    ],
    "float8 layers": [f"{GUARDS}::test_float8"],
    "datasets of different (known) size": [
        f"{MISTAKES}::other_number_of_batches",
        f"{MISTAKES}::other_components",
        f"{MISTAKES}::other_number_of_rows",
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
