"""Training steps that mix the rows of a batch are told from others, by a trial on a few rows, and warned of once."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.features.reference import only_fit
from tests.models import assert_arrays, in_scope, ready, warned
from tests.tiers import daily
from tfdist.steps.keras_step import KerasStep
from tfdist.strategies.data_parallel import row_trial
from tfdist.strategies.data_parallel.row_trial import _is_keras_own, _loss_mixes_rows, _metric_mixes_rows
from tfdist.testing import assert_transparent

X = np.random.RandomState(0).randn(16, 8).astype("float32")
Y = X[:, :3]


class MinibatchDeviation(layers.Layer):
    """As in progressive GANs: how much the rows of the batch differ, as one more feature."""

    def call(self, x: Any) -> Any:
        return ops.concatenate([x, ops.ones_like(x[:, :1]) * ops.mean(ops.std(x, axis=0))], -1)


class SumOfActivity(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.sum(x**2))
        return x


class MeanOfActivity(layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * ops.mean(x**2))
        return x


class OwnCall(keras.losses.Loss):
    """Reduces by itself."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.square(y_true - y_pred), -1)

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return ops.sum(self.call(y_true, y_pred))


class Own(keras.Model):
    """A model with a step of its own.

    Args:
        loss: of targets and predictions.
        count: what of the rows a `Mean` and a `Sum` are given, once a batch.
    """

    def __init__(self, loss: Callable, count: Callable | None = None) -> None:
        super().__init__()
        self.dense, self.own_loss, self.count = layers.Dense(3), loss, count
        self.tokens, self.total = keras.metrics.Mean(name="tokens"), keras.metrics.Sum(name="total")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: tuple) -> dict:
        with tf.GradientTape() as tape:
            loss = self.own_loss(data[1], self(data[0], training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        if self.count is not None:
            self.tokens.update_state(self.count(data[0]))
            self.total.update_state(self.count(data[0]))
        return {"loss": tf.reduce_mean(loss)}


class OtherSteps(Own):
    """Steps that do not train, and mix the rows of a batch."""

    def test_step(self, data: tuple) -> dict:
        outputs = self(data[0], training=False)
        self.tokens.update_state(negatives(data[1], outputs))
        return {"tokens": self.tokens.result()}

    def predict_step(self, data: Any) -> Any:
        outputs = self(data[0] if isinstance(data, tuple) else data, training=False)
        return outputs - ops.mean(outputs, axis=0)


class Centred(Own):
    """Only its `train_step` leaves rows alone."""

    def call(self, x: Any, training: bool = False) -> Any:
        outputs = super().call(x)
        return outputs if training else outputs - ops.mean(outputs, axis=0)


class OtherLoss(keras.Model):
    def __init__(self, loss: Callable) -> None:
        super().__init__()
        self.dense, self.own_loss = layers.Dense(3), loss

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        return self.own_loss(y, y_pred)


class NumberOfRows(keras.Model):
    def call(self, x: Any) -> Any:
        return {"rows": x, "how many": tf.shape(x)[0], "constant": tf.ones([3])}


class Outputs(keras.Model):
    """Returns rows, and what a function makes of them."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function, self.dense = function, layers.Dense(2)

    def call(self, x: Any) -> Any:
        rows = self.dense(x)
        return {"rows": rows, "others": self.function(rows)}


class SharpnessAware(Own):
    """Moves the weights along the gradient, at whose new place it takes another one."""

    def train_step(self, data: Any) -> Any:
        x, y = data

        def gradients() -> list:
            with tf.GradientTape() as tape:
                loss = mean(y, self(x))
            return tape.gradient(loss, self.trainable_variables)

        first = gradients()
        moves = [0.5 * one / tf.linalg.global_norm(first) for one in first]
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_add(move)
        second = gradients()
        for weight, move in zip(self.trainable_variables, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(second, self.trainable_variables)
        return {"loss": mean(y, self(x))}


class Tracked(Own):
    """Has a metric that only the end of an epoch reads."""

    class Highest(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.state = self.add_weight(initializer="zeros")

        def update_state(self, values: Any) -> None:
            self.state.assign_add(ops.sum(values))

        def result(self) -> float:
            return float(self.state.numpy())

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.highest = self.Highest()

    def train_step(self, data: Any) -> Any:
        self.highest.update_state(data[0])
        return super().train_step(data)


def mean(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred))


def vector(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred), -1)


def negatives(y_true: Any, y_pred: Any) -> Any:
    """SimCLR's, of which each row is told from the others of the batch."""
    logits = tf.matmul(tf.nn.l2_normalize(y_pred, -1), tf.nn.l2_normalize(y_true, -1), transpose_b=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(logits)[0]), logits))


def of_positives(y_true: Any, y_pred: Any, total: Callable = lambda value: value) -> Any:
    """As detectors do: over the rows that show something."""
    positive = ops.cast(y_true > 0.5, "float32")
    return total(ops.sum(ops.square(y_true - y_pred) * positive)) / ops.maximum(total(ops.sum(positive)), 1)


def of_ones(y_true: Any, y_pred: Any) -> Any:
    ones = ops.cast(ops.equal(y_true, 1), "float32")
    return ops.sum(ops.square(y_true - y_pred) * ones) / ops.maximum(ops.sum(ones), 1)


class Largest(keras.metrics.Metric):
    """The largest error; `update` makes the next state from the one before and a batch's errors."""

    def __init__(self, update: Callable = lambda state, errors: ops.maximum(state, ops.max(errors)), **kwargs: Any):
        super().__init__(name="largest")
        self.update, self.state = update, self.add_variable((), "zeros", name="state", **kwargs)

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.state.assign(self.update(self.state, ops.abs(y_true - y_pred)))

    def result(self) -> Any:
        return self.state


def of_all_rows(state: Any, errors: Any) -> Any:
    context = tf.distribute.get_replica_context()
    if context is not None and context.num_replicas_in_sync > 1:
        errors = context.all_gather(errors, axis=0)
    return ops.maximum(state, ops.max(errors))


class RootOfSums(keras.metrics.Metric):
    """Two sums of which one is a whole number, and metrics of Keras' inside."""

    def __init__(self) -> None:
        super().__init__(name="root")
        self.total = self.add_weight(initializer="zeros", name="total")
        self.count = self.add_weight(initializer="zeros", dtype="int32", name="count")
        self.inner, self.sum = keras.metrics.Mean(), keras.metrics.Sum()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(ops.sum((y_true - y_pred) ** 2))
        self.count.assign(self.count + ops.shape(y_true)[0])
        self.inner.update_state(ops.mean(y_pred))
        self.sum.update_state(ops.sum(y_pred))

    def result(self) -> Any:
        return {
            "root": ops.sqrt(self.total / ops.cast(self.count, "float32")),
            "inner": self.inner.result(),
            "sum": self.sum.result(),
        }


class PositiveActivity(layers.Layer):
    def call(self, x: Any) -> Any:
        positive = ops.cast(x[:, :1] > 0.1, "float32")
        self.add_loss(0.1 * ops.sum(x**2 * positive) / ops.maximum(ops.sum(positive), 1))
        return x


def root(y_true: Any, y_pred: Any) -> Any:
    return ops.sqrt(mean(y_true, y_pred))


def r_squared(y_true: Any, y_pred: Any) -> Any:
    return 1 - ops.sum(ops.square(y_true - y_pred)) / ops.sum(ops.square(y_true - ops.mean(y_true)))


def true_positives(y_true: Any, y_pred: Any) -> Any:
    return ops.sum(ops.round(ops.clip(y_true * y_pred, 0, 1)))


def positives(y: Any) -> Any:
    return ops.sum(ops.round(ops.clip(y, 0, 1)))


# As they have been copied since Keras 2.
def recall_m(y_true: Any, y_pred: Any) -> Any:
    return true_positives(y_true, y_pred) / (positives(y_true) + 1e-7)


def precision_m(y_true: Any, y_pred: Any) -> Any:
    return true_positives(y_true, y_pred) / (positives(y_pred) + 1e-7)


def f1_m(y_true: Any, y_pred: Any) -> Any:
    precision, recall = precision_m(y_true, y_pred), recall_m(y_true, y_pred)
    return 2 * precision * recall / (precision + recall + 1e-7)


def specificity(y_true: Any, y_pred: Any) -> Any:
    return recall_m(1 - y_true, 1 - y_pred)


def dice(y_true: Any, y_pred: Any, smooth: float = 1.0) -> Any:
    shared = ops.sum(ops.reshape(y_true, (-1,)) * ops.reshape(y_pred, (-1,)))
    return (2 * shared + smooth) / (ops.sum(y_true) + ops.sum(y_pred) + smooth)


def iou(y_true: Any, y_pred: Any) -> Any:
    y_true, y_pred = (ops.cast(one > 0.5, "float32") for one in (y_true, y_pred))
    return ops.sum(y_true * y_pred) / (ops.sum(ops.maximum(y_true, y_pred)) + 1e-7)


RATIOS = (recall_m, precision_m, f1_m, specificity, dice, iou)


def macro_recall(y_true: Any, y_pred: Any) -> Any:
    """Over the classes that there are."""
    width = ops.shape(y_pred)[-1]
    actual = ops.one_hot(ops.cast(ops.reshape(y_true, (-1,)), "int32"), width)
    hits = ops.sum(actual * ops.one_hot(ops.argmax(y_pred, -1), width), 0)
    there = ops.sum(actual, 0)
    return ops.sum(hits / ops.maximum(there, 1)) / ops.sum(ops.cast(there > 0, "float32"))


def right(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.cast(ops.equal(y_true > 0.5, y_pred > 0.5), "float32"))


def right_of_each_row(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.cast(ops.equal(y_true > 0.5, y_pred > 0.5), "float32"), -1)


def dice_of_each_row(y_true: Any, y_pred: Any) -> Any:
    return 2 * ops.sum(y_true * y_pred, -1) / (ops.sum(y_true + y_pred, -1) + 1.0)


class MeanOfRecalls(keras.metrics.Metric):
    """The mean over the batches of their recalls."""

    def __init__(self, name: str = "mean_of_recalls") -> None:
        super().__init__(name=name)
        self.total, self.count = (self.add_weight(initializer="zeros", name=one) for one in ("total", "count"))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(recall_m(y_true, y_pred))
        self.count.assign_add(1.0)

    def result(self) -> Any:
        return self.total / (self.count + 1e-7)


class HoldsMean(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="holds_mean")
        self.mean = keras.metrics.Mean()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.mean.update_state(recall_m(y_true, y_pred))

    def result(self) -> Any:
        return self.mean.result()


class IsMean(keras.metrics.Mean):
    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(f1_m(y_true, y_pred), sample_weight)


class F1OfSums(keras.metrics.Metric):
    """As it should be: of the true positives and the positives of all batches."""

    def __init__(self) -> None:
        super().__init__(name="f1_of_sums")
        self.hits, self.all = (self.add_weight(initializer="zeros", name=one) for one in ("hits", "all"))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.hits.assign_add(true_positives(y_true, y_pred))
        self.all.assign_add(positives(y_true) + positives(y_pred))

    def result(self) -> Any:
        return 2 * self.hits / (self.all + 1e-7)


class F1OfParts(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="f1_of_parts")
        self.precision, self.recall = keras.metrics.Precision(), keras.metrics.Recall()

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        for one in (self.precision, self.recall):
            one.update_state(y_true, y_pred, sample_weight)

    def result(self) -> Any:
        precision, recall = self.precision.result(), self.recall.result()
        return 2 * precision * recall / (precision + recall + 1e-7)


class ByHand(Own):
    """Two ratios that the step computes."""

    def __init__(self) -> None:
        super().__init__(mean)
        self.recall, self.missed = keras.metrics.Mean(name="recall"), keras.metrics.Mean(name="missed")

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.recall.update_state(recall_m(y, self(x)))
        self.missed.update_state(specificity(y, self(x)))
        return super().train_step(data)


def compiled(*hidden: type | Callable, loss: Any = "mse", **metrics: tuple) -> Callable[[], keras.Model]:
    """What makes a model; `metrics` and `weighted_metrics` as in `compile`."""
    return lambda: ready(
        keras.Sequential([keras.Input((8,)), layers.Dense(8), *(make() for make in hidden), layers.Dense(3)]),
        keras.optimizers.SGD(0.05),
        loss,
        **{
            key: [one() if isinstance(one, type) or getattr(one, "__name__", "") == "<lambda>" else one for one in of]
            for key, of in metrics.items()
        },
    )


def own(*arguments: Any, kind: type = Own) -> Callable[[], keras.Model]:
    return lambda: ready(kind(*arguments), keras.optimizers.SGD(0.05))


def said_of_fits(strategy: tf.distribute.Strategy, build: Callable, x: Any = X) -> list[str]:
    keras.utils.set_random_seed(1)  # other weights may hide what mixes rows
    model = in_scope(strategy, build)
    return warned(lambda: [model.fit(x, Y, batch_size=8, epochs=2, verbose=0) for _ in range(2)], "Received: ")


@pytest.mark.parametrize(
    ("build", "culprit"),
    [
        (
            compiled(lambda: layers.Dropout(0.2), MinibatchDeviation),
            r"layer 'sequential\S*/minibatch_deviation\S*' .*mixes the rows",
        ),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in [
                (compiled(SumOfActivity), "a loss of model 'sequential"),
                (lambda: compiled(loss=OwnCall())(), "a loss of model 'sequential"),
                (own(vector), "Own.train_step"),
                (own(of_positives), "Own.train_step"),
                (own(of_ones, kind=OtherLoss), "OtherLoss.compute_loss"),
                (compiled(PositiveActivity), "a loss of model 'sequential"),
            ]
        ),
        (own(negatives), r"Own.train_step, whose gradient .*all_gather"),
        (own(mean, kind=SharpnessAware), "SharpnessAware.train_step, whose gradient"),
        (own(of_positives, kind=OtherLoss), r"OtherLoss.compute_loss, whose gradient .*tfdist.global_sum"),
        (compiled(loss=root), "loss 'root'"),
    ],
)
def test_steps_that_mix_rows(mirrored, build, culprit):
    (message,) = said_of_fits(mirrored, build)
    assert re.search(culprit, message), message


@pytest.mark.parametrize(
    ("hidden", "loss", "is_own"),
    [
        ([lambda: layers.Dense(4, "relu"), layers.BatchNormalization, lambda: layers.Dropout(0.1)], "mse", True),
        ([MeanOfActivity], "mse", False),
        ([lambda: layers.Lambda(lambda x: x - ops.mean(x, 0))], "mse", False),
        ([lambda: layers.Dense(4, lambda x: x - ops.mean(x, 0))], "mse", False),
        ([lambda: layers.Softmax(axis=0)], "mse", False),
        ([lambda: layers.UnitNormalization(axis=(0, 1))], "mse", False),
        ([], lambda y_true, y_pred: ops.mean(y_pred), False),
    ],
)
def test_only_keras_own_parts_need_no_trial(hidden, loss, is_own):
    model = compiled(*hidden, loss=loss)()
    model.train_on_batch(X, Y)
    assert _is_keras_own(model) is is_own
    own_nodes = keras.Model(model.inputs, ops.mean(model.outputs[0], axis=0, keepdims=True))
    assert not _is_keras_own(own_nodes)


@pytest.mark.parametrize(
    "build",
    [
        compiled(layers.BatchNormalization, MeanOfActivity, lambda: layers.Dropout(0.5)),
        *(
            pytest.param(build, marks=pytest.mark.nightly)
            for build in [
                own(mean),
                lambda: compiled(loss=keras.losses.MeanSquaredError(reduction="sum"))(),
                lambda: compiled(loss=keras.losses.MeanSquaredError(reduction="none"))(),
                compiled(lambda: layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")),
            ]
        ),
    ],
)
def test_steps_that_do_not(mirrored, build):
    assert said_of_fits(mirrored, build) == []


def test_a_loss_that_is_not_reduced(mirrored):
    """Keras back-propagates the sum of such a vector, also where batches do not divide."""
    build = lambda: compiled(loss=keras.losses.MeanSquaredError(reduction="none"))()  # noqa: E731
    with only_fit():
        assert_transparent(mirrored, build, (X[:13], Y[:13]), batch_size=5)


class CutToLongest(layers.Layer):
    def call(self, ids: Any) -> Any:
        return ids[:, : ops.max(ops.sum(ops.cast(ids != 0, "int32"), 1))]

    def compute_output_shape(self, shape: tuple) -> tuple:
        return (shape[0], None)


def test_the_longest_row_of_a_batch(mirrored):
    """The rows of the trial differ in length, as padded ones do."""
    ids = np.random.RandomState(0).randint(1, 5, (16, 10)) * (np.arange(10) < 1 + np.arange(16)[:, None] % 9)

    def build() -> keras.Model:
        hidden = [layers.Embedding(5, 4), layers.GlobalAveragePooling1D(), layers.Dense(3)]
        return ready(keras.Sequential([keras.Input((10,), dtype="int32"), CutToLongest(), *hidden]), "sgd", "mse")

    (message,) = said_of_fits(mirrored, build, ids)
    assert "(CutToLongest), which pads to the longest row" in message


def count_rows(x: Any) -> Any:
    return float(x.shape[0] or 4)


def sum_and_a_constant(x: Any) -> Any:
    return tf.reduce_sum(x**2) + 1


@pytest.mark.parametrize(
    "count", daily([pytest.param(one, id=one.__name__) for one in (count_rows, sum_and_a_constant)], "count_rows")
)
def test_counts_of_a_batch(mirrored, count):
    """A `Mean` or `Sum` of numbers that grow with the batch: 1/n of one process', by rows."""
    messages = said_of_fits(mirrored, own(mean, count))
    assert ["'tokens' (Mean)" in messages[0], "'total' (Sum)" in messages[1], len(messages)] == [True, True, 2]


# What is called -> what is said, in this order.
CALLS = {
    "all three, a layer": (compiled(MinibatchDeviation), ["predict", "evaluate", "fit"], ["(MinibatchDeviation)"]),
    "a test_step": (own(mean, kind=OtherSteps), ["fit", "evaluate"], ["'tokens' (Mean)"]),
    "a predict_step": (own(mean, kind=OtherSteps), ["fit", "predict"], ["OtherSteps.predict_step"]),
    "a compiled loss after a train_step": (
        lambda: ready(Own(mean), keras.optimizers.SGD(0.05), root),
        ["fit", "evaluate", "predict"],
        ["loss 'root', which mixes the rows"],
    ),
    "an output after a train_step": (own(mean, kind=Centred), ["fit", "predict"], ["(Centred), which mixes"]),
    "a number of rows": (NumberOfRows, ["predict"], ["an output of shape ()"]),
    "compute_loss": (own(negatives, kind=OtherLoss), ["evaluate", "fit"], ["loss, whose loss", "loss, whose gradient"]),
    "rows": (compiled(MeanOfActivity, layers.BatchNormalization), ["evaluate", "predict", "fit"], []),
    "the root of a mean": (
        compiled(MeanOfActivity, metrics=(root,)),
        ["evaluate"],
        ["(MeanMetricWrapper), given one number a batch"],
    ),
    "a metric beside layers of Keras": (
        compiled(metrics=(r_squared,)),
        ["fit"],
        ["(MeanMetricWrapper), given one number a batch"],
    ),
    "a maximum": (compiled(metrics=(Largest,)), ["fit", "evaluate"], ["'largest' (Largest), whose state for a batch"]),
    "a moving average": (
        compiled(metrics=(lambda: Largest(lambda state, errors: 0.9 * state + 0.1 * ops.mean(errors)),)),
        ["evaluate"],
        ["'largest' (Largest), whose state for a batch"],
    ),
    "a maximum beside a layer": (
        compiled(MinibatchDeviation, metrics=(Largest,)),
        ["fit"],
        ["(MinibatchDeviation), which mixes", "'largest' (Largest), whose state for a batch"],
    ),
    "a result that is no tensor": (
        own(negatives, kind=Tracked),
        ["fit"],
        ["Tracked.train_step, whose gradient"],
    ),
    "ratios of counts": (
        compiled(metrics=RATIOS),
        ["fit", "evaluate"],
        [f"'{one.__name__}' (MeanMetricWrapper), given one number a batch" for one in RATIOS],
    ),
    "one ratio beside what is exact": (
        compiled(weighted_metrics=("accuracy", recall_m, right_of_each_row)),
        ["evaluate", "fit"],
        ["'recall_m' (MeanMetricWrapper), given one number a batch"],
    ),
    "means of ratios in a class": (
        compiled(metrics=(MeanOfRecalls, HoldsMean), weighted_metrics=(IsMean,)),
        ["fit", "evaluate"],
        ["(MeanOfRecalls), whose state", "(HoldsMean), whose state", "(IsMean), given one number a batch"],
    ),
    "ratios beside a layer": (
        compiled(MinibatchDeviation, metrics=(dice, right, F1OfSums)),
        ["fit"],
        ["(MinibatchDeviation), which mixes", "'dice' (MeanMetricWrapper), given one number a batch"],
    ),
    "ratios that a step computes": (own(kind=ByHand), ["fit"], ["'missed' (Mean), given", "'recall' (Mean), given"]),
    "metrics that are exact": (
        compiled(
            metrics=(
                *("accuracy", "mae", mean, right, right_of_each_row, dice_of_each_row, F1OfSums, F1OfParts),
                *(keras.metrics.Recall, keras.metrics.Precision, keras.metrics.AUC, keras.metrics.BinaryAccuracy),
            ),
            weighted_metrics=(right_of_each_row, F1OfParts, keras.metrics.Recall),
        ),
        ["fit", "evaluate"],
        [],
    ),
    "metrics that are sums": (compiled(metrics=(RootOfSums,)), ["fit", "evaluate"], []),
    "whole numbers": (lambda: Outputs(lambda rows: tf.argsort(rows, axis=0)), ["predict"], ["(Outputs), which mixes"]),
    "other numbers of rows": (
        lambda: Outputs(lambda rows: tf.math.top_k(tf.transpose(rows), 2).values),
        ["predict"],
        ["an output of shape (2, 2) from predict"],
    ),
    "all pairs of rows, in one vector": (
        lambda: Outputs(lambda rows: tf.reshape(tf.matmul(rows, rows, transpose_b=True), [-1])),
        ["predict"],
        ["an output of model"],
    ),
    "outputs without rows": (
        lambda: Outputs(lambda rows: (tf.reduce_mean(rows, 0), tf.reduce_sum(rows), tf.cast(rows > 0, "int32"))),
        ["predict"],
        [],
    ),
    "means": (compiled(MeanOfActivity, metrics=(mean,)), ["fit", "evaluate"], []),
}


def said(strategy: tf.distribute.Strategy, name: str) -> list[str]:
    build, methods, _ = CALLS[name]
    given = {"fit": (X, Y), "evaluate": (X, Y), "predict": (X,)}
    model = in_scope(strategy, build)
    calls = [functools.partial(getattr(model, method), *given[method]) for method in methods]
    return warned(lambda: [call(batch_size=8, verbose=0) for call in calls], "Received: ")


# All of them are run on two workers, too: tests/cluster/test_as_one_process.py.
@pytest.mark.nightly
@pytest.mark.parametrize("name", daily(CALLS, "a predict_step", "a metric beside layers of Keras", "a maximum"))
def test_steps_that_do_not_train(mirrored, name):
    found, expected = said(mirrored, name), CALLS[name][-1]
    assert len(found) == len(expected) and all(map(str.__contains__, found, expected)), found


@pytest.mark.nightly
def test_a_maximum_of_all_rows_is_that_of_one_process(mirrored):
    """What the warning asks for."""

    def largest() -> Largest:
        return Largest(of_all_rows, aggregation="only_first_replica")

    data = X[:13], Y[:13]
    assert_transparent(mirrored, compiled(metrics=(lambda: largest(),)), data, batch_size=5, validation_data=data)
    assert said_of_fits(mirrored, compiled(metrics=(lambda: largest(),))) == []


@tf.function
def nested(x: Any) -> Any:
    return x + tf.random.normal(tf.shape(x))


# Random numbers that a layer draws: a trial has the same ones for all rows.
DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "tf.random.normal": lambda x, _: x + tf.random.normal(tf.shape(x)),
    "tf.random.uniform of whole numbers": lambda x, _: (
        x + tf.cast(tf.random.uniform(tf.shape(x), 0, 4, tf.int32), "float32")
    ),
    "stateless": lambda x, _: x * tf.cast(tf.random.stateless_uniform(tf.shape(x), (1, 2)) >= 0.5, "float32"),
    "one for the batch": lambda x, _: x * tf.random.uniform(()),
    "keras.random.normal": lambda x, seeds: x + keras.random.normal(ops.shape(x), seed=seeds),
    "keras.random.uniform, global seeds": lambda x, _: x * keras.random.uniform(ops.shape(x)),
    "keras.random.randint": lambda x, seeds: (
        x + ops.cast(keras.random.randint(ops.shape(x), 0, 4, seed=seeds), "float32")
    ),
    "keras.random.dropout": lambda x, seeds: keras.random.dropout(x, 0.3, seed=seeds),
    "keras.random.shuffle": lambda x, seeds: keras.random.shuffle(x, axis=1, seed=seeds),
    "in a tf.function": lambda x, _: nested(x),
    "in tf.map_fn": lambda x, _: tf.map_fn(lambda row: row + tf.random.normal(tf.shape(row)), x),
    "in a branch": lambda x, _: tf.cond(
        tf.random.uniform(()) < 0.5, lambda: x, lambda: x + tf.random.normal(tf.shape(x))
    ),
}


class Draws(layers.Layer):
    def __init__(self, draw: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.draw, self.seeds = draw, keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        return self.draw(x, self.seeds)


@pytest.mark.parametrize("name", daily(DRAWS, "keras.random.uniform, global seeds"))
def test_steps_that_draw_are_tried(mirrored, name, caplog):
    of = functools.partial(Draws, DRAWS[name])
    assert said_of_fits(mirrored, compiled(of, MeanOfActivity)) == []
    (message,) = said_of_fits(mirrored, compiled(of, MinibatchDeviation))
    assert "(MinibatchDeviation), which mixes" in message and "A mistake of tfdist" not in caplog.text


def test_functions_that_draw_still_do_after_a_trial(mirrored):
    """The trial replaces draws in a copy: a tf.function that it is the first to call draws afterwards."""

    @tf.function
    def draw(x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))

    said_of_fits(mirrored, compiled(lambda: Draws(lambda x, _: draw(x)), MeanOfActivity))
    first, second = draw(tf.zeros((4, 4))), draw(tf.zeros((4, 4)))
    assert np.ptp(first) > 0.1 and np.ptp(first - second) > 0.1


def test_nothing_of_the_model_changes(mirrored, monkeypatch):
    """The trial runs the step on rows of its own; weights, state, metrics and seeds do not see it."""

    class Counting(layers.Layer):
        def build(self, shape: tuple) -> None:
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="mean")

        def call(self, x: Any) -> Any:
            self.calls.assign(self.calls + 1.0)
            return x

    build, found = compiled(Counting, layers.BatchNormalization, lambda: layers.Dropout(0.5)), []
    for most, tried in ((0, None), (row_trial.MOST_OPERATIONS, [])):
        monkeypatch.setattr(row_trial, "MOST_OPERATIONS", most)
        keras.utils.set_random_seed(1)
        model = in_scope(mirrored, build)
        losses = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
        assert vars(model)[row_trial._TRIED]["train"][1] == tried
        found.append([*losses, *(variable.numpy() for variable in (*model.variables, *model.optimizer.variables))])
    assert_arrays(*found)


def test_predictions_as_wide_as_the_longest_row(mirrored):
    model = in_scope(
        mirrored,
        lambda: ready(
            keras.Sequential([keras.Input((1,), dtype="string"), layers.TextVectorization(vocabulary=["a", "b"])]),
            "sgd",
            "mse",
        ),
    )
    texts = tf.constant([["a"], ["b a"], ["a b a b"]])
    expected = [[2, 0, 0, 0], [3, 2, 0, 0], [2, 3, 2, 3]]
    assert model.predict_on_batch(texts).tolist() == model.predict(texts, verbose=0).tolist() == expected


def test_a_step_that_is_too_large_for_a_trial(mirrored, monkeypatch):
    monkeypatch.setattr(row_trial, "MOST_OPERATIONS", 0)
    loss, metric = said_of_fits(mirrored, compiled(loss=root, metrics=(recall_m,)))
    assert "'root', which mixes the rows" in loss and "'recall_m' (MeanMetricWrapper), given one number" in metric


@pytest.mark.nightly
def test_a_loss_that_keeps_something_is_not_tried(mirrored):
    class Counting(keras.losses.Loss):
        def __init__(self, aggregation: str) -> None:
            super().__init__()
            self.calls = keras.Variable(0.0, trainable=False, aggregation=aggregation)
            self.seeds = keras.random.SeedGenerator(1)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            self.calls.assign(self.calls + 1)
            return tf.reduce_mean(tf.square(y_true - y_pred)) + keras.random.uniform((), seed=self.seeds)

    for aggregation in ("none", "only_first_replica"):
        with mirrored.scope():
            loss = Counting(aggregation)
            model = compiled(loss=loss)()
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
        assert [float(part) for part in loss.calls.value.values] == [1.0, 1.0]
        assert int(np.asarray(loss.seeds.state)[1]) == 1


def test_targets_that_are_numbers_of_classes():
    classes, scores = tf.TensorSpec((4,), tf.int32), tf.TensorSpec((4, 5))
    assert not _loss_mixes_rows(keras.losses.sparse_categorical_crossentropy, [classes, scores])
    assert _loss_mixes_rows(keras.losses.circle, [classes, scores])


@pytest.mark.parametrize(
    ("metric", "shapes", "mixes"),
    [
        *((one, [(8, 1), (8, 1)], True) for one in RATIOS),
        *((one, [(None, 16, 16, 1), (None, 16, 16, 1)], True) for one in RATIOS),
        *((one, [(8, 10), (8, 10)], True) for one in RATIOS),
        (macro_recall, [(8,), (8, 3)], True),
        (macro_recall, [(8, 1), (8, 10)], True),
        (right, [(8, 1), (8, 1)], False),
        (right_of_each_row, [(8, 1), (8, 1), (8,)], False),
        (dice_of_each_row, [(None, 16, 16, 1), (None, 16, 16, 1)], False),
        (F1OfSums, [(None, 1), (None, 1)], False),
        (F1OfParts, [(8, 3), (8, 3), (8,)], False),
    ],
)
def test_metrics_by_themselves(mirrored, metric, shapes, mixes):
    """Whatever a model predicts."""
    with mirrored.scope():
        metric = metric() if isinstance(metric, type) else keras.metrics.MeanMetricWrapper(metric)
    given = tuple(tf.TensorSpec(shape) for shape in shapes), {}
    assert _metric_mixes_rows(KerasStep("test", keras.Sequential(), print), metric, given) is mixes


def test_what_cannot_be_tried_says_nothing():
    def fails(y_true: Any, y_pred: Any) -> Any:
        raise TypeError("only eight rows")

    def draws(y_true: Any, y_pred: Any) -> Any:
        return tf.random.uniform(())

    few = tf.TensorSpec((4, 3))
    assert not _loss_mixes_rows(fails, [few, few])
    assert not _loss_mixes_rows(draws, [few, few])


def test_a_mistake_of_the_trial_itself_is_logged(mirrored, monkeypatch, caplog):
    monkeypatch.setattr(row_trial, "_DIGITS", None)
    assert said_of_fits(mirrored, own(negatives)) == []
    assert "A mistake of tfdist" in caplog.text and "TypeError" in caplog.text
