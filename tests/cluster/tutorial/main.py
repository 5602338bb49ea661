"""`main.py` of TensorFlow's tutorial "Multi-worker training with Keras"; `tfdist` is all that was changed."""

import json
import os

import mnist_setup
import tensorflow as tf

import tfdist

per_worker_batch_size = 64
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])

strategy = tfdist.MultiWorkerMirroredStrategy()

global_batch_size = per_worker_batch_size * num_workers
multi_worker_dataset = mnist_setup.mnist_dataset(global_batch_size)

with strategy.scope():
    # Model building/compiling need to be within `strategy.scope()`.
    multi_worker_model = mnist_setup.build_and_compile_cnn_model()

history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=70)
print("accuracy:", json.dumps(history.history["accuracy"]), flush=True)

# Model saving and loading
model_path = os.path.abspath("keras-model.keras")


def _is_chief(task_type, task_id):
    return (task_type == "worker" and task_id == 0) or task_type is None


def _get_temp_dir(dirpath, task_id):
    base_dirpath = "workertemp_" + str(task_id)
    temp_dir = os.path.join(dirpath, base_dirpath)
    tf.io.gfile.makedirs(temp_dir)
    return temp_dir


def write_filepath(filepath, task_type, task_id):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = _get_temp_dir(dirpath, task_id)
    return os.path.join(dirpath, base)


task_type, task_id = (strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id)
write_model_path = write_filepath(model_path, task_type, task_id)

multi_worker_model.save(write_model_path)
print("written:", os.path.exists(write_model_path), flush=True)

if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(os.path.dirname(write_model_path))

loaded_model = tf.keras.models.load_model(model_path)
x, y = mnist_setup.load_data()
loss, accuracy = loaded_model.evaluate((x / 255).astype("float32"), y, batch_size=512, verbose=0)
print("loaded model:", accuracy, flush=True)

# Checkpoint saving and restoring
checkpoint_dir = os.path.abspath("ckpt")
checkpoint = tf.train.Checkpoint(model=multi_worker_model)
write_checkpoint_dir = write_filepath(checkpoint_dir, task_type, task_id)
checkpoint_manager = tf.train.CheckpointManager(checkpoint, directory=write_checkpoint_dir, max_to_keep=1)
checkpoint_manager.save()
if not _is_chief(task_type, task_id):
    tf.io.gfile.rmtree(write_checkpoint_dir)
latest_checkpoint = tf.train.latest_checkpoint(checkpoint_dir)
checkpoint.restore(latest_checkpoint)
multi_worker_model.fit(multi_worker_dataset, epochs=2, steps_per_epoch=5)

# The `BackupAndRestore` and `ModelCheckpoint` callbacks
callbacks = [
    tf.keras.callbacks.BackupAndRestore(backup_dir=os.path.abspath("backup")),
    tf.keras.callbacks.ModelCheckpoint(os.path.abspath("best.keras"), monitor="loss", save_best_only=True),
]
with strategy.scope():
    multi_worker_model = mnist_setup.build_and_compile_cnn_model()
history = multi_worker_model.fit(multi_worker_dataset, epochs=3, steps_per_epoch=35, callbacks=callbacks)
print("with callbacks:", json.dumps(history.history["loss"]), flush=True)
