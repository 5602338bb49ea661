"""The loop of TensorFlow's tutorial "Parameter server training with ParameterServerStrategy", with tfdist's strategy.

It is a program of one process, with servers in it. Words are numbers here: the tutorial looks them up first.
"""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.cluster.ports import reserve

NUM_WORKERS = 3
NUM_PS = 2


def create_in_process_cluster() -> Any:
    """Creates and starts local servers and returns the cluster_resolver."""
    with reserve(NUM_WORKERS + NUM_PS) as reservation:
        places = [f"localhost:{port}" for port in reservation.ports]
        cluster_spec = tf.train.ClusterSpec({"worker": places[:NUM_WORKERS], "ps": places[NUM_WORKERS:]})
        # Workers need some inter_ops threads to work properly.
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=NUM_WORKERS + 1)
        for job in cluster_spec.jobs:
            for index in range(cluster_spec.num_tasks(job)):
                tf.distribute.Server(cluster_spec, job_name=job, task_index=index, config=config, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


def train_with_a_loop(strategy: Any) -> dict[str, Any]:
    """Training with a custom training loop."""
    words = np.random.default_rng(1).permuted(np.tile(np.arange(7), (200, 1)), axis=1)[:, :3]
    labels = (words == 0).any(1, keepdims=True).astype("int64")

    def dataset_fn(_: Any) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((words, labels)).shuffle(200).batch(32).repeat()

    with strategy.scope():
        model_input = keras.layers.Input(shape=(3,), dtype=tf.int64, name="model_input")
        emb_output = keras.ops.mean(keras.layers.Embedding(input_dim=7, output_dim=64)(model_input), axis=1)
        model = keras.Model(model_input, keras.layers.Dense(units=1, activation="sigmoid")(emb_output))
        optimizer = keras.optimizers.RMSprop(learning_rate=0.1)
        optimizer.build(model.trainable_variables)
        accuracy = keras.metrics.Accuracy()

    @tf.function
    def step_fn(iterator: Any) -> tf.Tensor:
        def replica_fn(batch_data: Any, labels: Any) -> tf.Tensor:
            with tf.GradientTape() as tape:
                pred = model(batch_data, training=True)
                per_example_loss = keras.losses.BinaryCrossentropy(reduction="none")(labels, pred)
                loss = tf.nn.compute_average_loss(per_example_loss)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            accuracy.update_state(labels, tf.cast(tf.greater(pred, 0.5), tf.int64))
            return loss

        losses = strategy.run(replica_fn, args=next(iterator))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def per_worker_dataset_fn() -> Any:
        return strategy.distribute_datasets_from_function(dataset_fn)

    per_worker_iterator = iter(coordinator.create_per_worker_dataset(per_worker_dataset_fn))
    accuracies = []
    for _ in range(8):
        accuracy.reset_state()
        for _ in range(5):
            coordinator.schedule(step_fn, args=(per_worker_iterator,))
        # Wait at epoch boundaries.
        coordinator.join()
        accuracies.append(float(accuracy.result().numpy()))
    loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
    return {
        "accuracies": accuracies,
        "loss": float(loss.fetch()),
        "iterations": int(optimizer.iterations.numpy()),
        "places": sorted({variable.value.device for variable in model.trainable_variables}),
    }


if __name__ == "__main__":
    # Set the environment variable to allow reporting worker and ps failure to the coordinator.
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    keras.utils.set_random_seed(1)
    partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(256 << 10, max_shards=NUM_PS)
    strategy = tfdist.ParameterServerStrategy(create_in_process_cluster(), variable_partitioner=partitioner)
    print(json.dumps(train_with_a_loop(strategy)), flush=True)
    # Past TensorFlow's servers, which have no end.
    os._exit(0)
