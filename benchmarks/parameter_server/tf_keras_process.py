"""A process of the cluster of the stock `tf.distribute.ParameterServerStrategy`, with tf_keras in the chief."""

from __future__ import annotations

import sys

import tensorflow as tf

from benchmarks.answering import answer_all
from benchmarks.parameter_server.chief import Chief


def main(address: str) -> None:
    """Answers the benchmark's requests; a worker or ps serves instead, until it is ended."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if resolver.task_type != "chief":
        server = tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc")
        server.join()
    import tf_keras

    strategy = tf.distribute.ParameterServerStrategy(resolver)

    def data_of(make):
        return tf_keras.utils.experimental.DatasetCreator(lambda context: make())

    answer_all(address, Chief(tf_keras, strategy, data_of, lambda trial: None))


if __name__ == "__main__":
    main(*sys.argv[1:])
