"""Replicas of which Python takes other layers: what they add up belongs to the same variables."""

from __future__ import annotations

import re

import pytest
import tensorflow as tf

from tests import unlike_replicas
from tests.tiers import daily
from tests.unlike_replicas import APART, KINDS, X, Y

DAILY = ("one of two", "an expert for some rows, eager")


@pytest.mark.parametrize("name", daily(KINDS, *DAILY))
def test_equals_one_process(mirrored, name):
    found, said = unlike_replicas.train(mirrored, name)
    expected, _ = unlike_replicas.train(tf.distribute.get_strategy(), name)
    assert unlike_replicas.difference(found, expected) < 2e-5
    # What data choose, and what is not a choice, is right without a word.
    is_chosen_for_good = "eager" not in name and name not in ("each weight twice", "in a tf.function")
    assert len(said) == is_chosen_for_good, said
    if said:
        assert re.search("on replica 0 than on replica 1, which has no gradient of '[a-z_0-9/]+'", said[0]), said


def test_layers_that_exchange_statistics_are_refused(mirrored):
    model = unlike_replicas.make(mirrored, APART)
    parted = r"on replica 0 and replica 1: .*normalization\S*' and the other to layer '.*normalization_\d+'"
    with pytest.raises(NotImplementedError, match=parted):
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.parametrize("error", [RuntimeError, AssertionError])
def test_an_error_of_the_users_own_stays(mirrored, error):
    def fails(x):
        if unlike_replicas.number_of_replica() == 1:
            raise error("mine")
        return x

    import keras

    with mirrored.scope():
        model = keras.Sequential(
            [keras.Input((6,)), keras.layers.BatchNormalization(), keras.layers.Lambda(fails), keras.layers.Dense(1)]
        )
        model.compile("sgd", "mse")
    with pytest.raises(error, match="mine"):
        model.fit(X, Y, batch_size=8, verbose=0)
