"""TensorFlow's tutorial "Parameter server training with ParameterServerStrategy", with tfdist's strategy and Keras 3.

What else differs is what Keras 3 asks for: optimizers.legacy and reset_states are gone, Keras' own mean instead of
tf.reduce_mean on symbolic tensors, targets with a last dimension (compile used to add it), a file name that ends in
.keras, the optimizer built in the scope. TensorBoard need not be installed: a CSV file instead of its log. The loop has
8 epochs instead of 4, because three workers with this learning rate now and then need more than 4. It is a program of
one process, with servers in it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
from typing import Any

import tensorflow as tf
from tensorflow import keras

import tfdist
from tfdist.cluster.ports import reserve

NUM_WORKERS = 3
NUM_PS = 2
GLOBAL_BATCH_SIZE = 64


def create_in_process_cluster(num_workers: int, num_ps: int) -> Any:
    """Creates and starts local servers and returns the cluster_resolver."""
    with reserve(num_workers + num_ps) as reservation:
        ports = reservation.ports
    cluster_dict = {"worker": [f"localhost:{port}" for port in ports[:num_workers]]}
    if num_ps > 0:
        cluster_dict["ps"] = [f"localhost:{port}" for port in ports[num_workers:]]
    cluster_spec = tf.train.ClusterSpec(cluster_dict)
    # Workers need some inter_ops threads to work properly.
    worker_config = tf.compat.v1.ConfigProto()
    if multiprocessing.cpu_count() < num_workers + 1:
        worker_config.inter_op_parallelism_threads = num_workers + 1
    for i in range(num_workers):
        tf.distribute.Server(cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc")
    for i in range(num_ps):
        tf.distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


def train_with_fit(strategy: Any, working_dir: str) -> dict[str, Any]:
    """Training with Model.fit."""
    x = tf.random.uniform((10, 10))
    y = tf.random.uniform((10, 1))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(10).repeat()
    dataset = dataset.batch(GLOBAL_BATCH_SIZE)
    dataset = dataset.prefetch(2)
    with strategy.scope():
        model = keras.models.Sequential([keras.layers.Dense(10)])
        model.compile(keras.optimizers.SGD(), loss="mse", steps_per_execution=10)
    callbacks = [
        keras.callbacks.CSVLogger(os.path.join(working_dir, "log.csv")),
        keras.callbacks.ModelCheckpoint(filepath=os.path.join(working_dir, "ckpt.keras")),
        keras.callbacks.BackupAndRestore(backup_dir=os.path.join(working_dir, "backup")),
    ]
    history = model.fit(dataset, epochs=5, steps_per_epoch=20, callbacks=callbacks, verbose=2)
    return {
        "losses": history.history["loss"],
        "iterations": int(model.optimizer.iterations.numpy()),
        "files": sorted(os.listdir(working_dir)),
    }


def train_with_a_loop(strategy: Any) -> dict[str, Any]:
    """Training with a custom training loop."""
    feature_vocab = ["avenger", "ironman", "batman", "hulk", "spiderman", "kingkong", "wonder_woman"]
    label_vocab = ["yes", "no"]

    with strategy.scope():
        feature_lookup_layer = keras.layers.StringLookup(vocabulary=feature_vocab, mask_token=None)
        label_lookup_layer = keras.layers.StringLookup(vocabulary=label_vocab, num_oov_indices=0, mask_token=None)

        raw_feature_input = keras.layers.Input(shape=(3,), dtype=tf.string, name="feature")
        feature_preprocess_stage = keras.Model(raw_feature_input, feature_lookup_layer(raw_feature_input))
        raw_label_input = keras.layers.Input(shape=(1,), dtype=tf.string, name="label")
        label_preprocess_stage = keras.Model(raw_label_input, label_lookup_layer(raw_label_input))

    def feature_and_label_gen(num_examples: int = 200) -> dict[str, list]:
        examples: dict[str, list] = {"features": [], "label": []}
        for _ in range(num_examples):
            features = random.sample(feature_vocab, 3)
            label = ["yes"] if "avenger" in features else ["no"]
            examples["features"].append(features)
            examples["label"].append(label)
        return examples

    examples = feature_and_label_gen()

    def dataset_fn(_: Any) -> tf.data.Dataset:
        raw_dataset = tf.data.Dataset.from_tensor_slices(examples)
        return (
            raw_dataset.map(
                lambda x: (
                    {"features": feature_preprocess_stage(x["features"][None])[0]},
                    label_preprocess_stage(x["label"][None])[0],
                )
            )
            .shuffle(200)
            .batch(32)
            .repeat()
        )

    with strategy.scope():
        model_input = keras.layers.Input(shape=(3,), dtype=tf.int64, name="model_input")
        emb_layer = keras.layers.Embedding(input_dim=len(feature_lookup_layer.get_vocabulary()), output_dim=16384)
        emb_output = keras.ops.mean(emb_layer(model_input), axis=1)
        dense_output = keras.layers.Dense(units=1, activation="sigmoid")(emb_output)
        model = keras.Model({"features": model_input}, dense_output)
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
            actual_pred = tf.cast(tf.greater(pred, 0.5), tf.int64)
            accuracy.update_state(labels, actual_pred)
            return loss

        batch_data, labels = next(iterator)
        losses = strategy.run(replica_fn, args=(batch_data, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)

    @tf.function
    def per_worker_dataset_fn() -> Any:
        return strategy.distribute_datasets_from_function(dataset_fn)

    per_worker_dataset = coordinator.create_per_worker_dataset(per_worker_dataset_fn)
    per_worker_iterator = iter(per_worker_dataset)

    accuracies = []
    for i in range(8):
        accuracy.reset_state()
        for _ in range(5):
            coordinator.schedule(step_fn, args=(per_worker_iterator,))
        # Wait at epoch boundaries.
        coordinator.join()
        accuracies.append(float(accuracy.result().numpy()))
        print(f"Finished epoch {i}, accuracy is {accuracies[-1]:f}.")
    loss = coordinator.schedule(step_fn, args=(per_worker_iterator,))
    return {
        "accuracies": accuracies,
        "loss": float(loss.fetch()),
        "iterations": int(optimizer.iterations.numpy()),
        "places": sorted({variable.value.device for variable in model.trainable_variables}),
    }


def main(working_dir: str) -> None:
    random.seed(1)
    keras.utils.set_random_seed(1)
    cluster_resolver = create_in_process_cluster(NUM_WORKERS, NUM_PS)
    variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
        min_shard_bytes=(256 << 10), max_shards=NUM_PS
    )
    strategy = tfdist.ParameterServerStrategy(cluster_resolver, variable_partitioner=variable_partitioner)
    found = {"fit": train_with_fit(strategy, working_dir), "loop": train_with_a_loop(strategy)}
    print(json.dumps(found), flush=True)
    # Past TensorFlow's servers, which have no end.
    os._exit(0)


if __name__ == "__main__":
    # Set the environment variable to allow reporting worker and ps failure to the coordinator.
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    main(sys.argv[1])
