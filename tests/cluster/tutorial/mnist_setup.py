"""`mnist_setup.py` of TensorFlow's tutorial "Multi-worker training with Keras", with digits that need no download."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits


def load_data():
    """1797 digits of 8x8 pixels, enlarged and padded to the 28x28 of MNIST."""
    digits = load_digits()
    enlarged = digits.images.repeat(3, axis=1).repeat(3, axis=2) * (255 / 16)
    return np.pad(enlarged, ((0, 0), (2, 2), (2, 2))), digits.target


def mnist_dataset(batch_size):
    x_train, y_train = load_data()
    x_train = (x_train / 255).astype(np.float32)
    y_train = y_train.astype(np.int64)
    train_dataset = tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(60000).repeat().batch(batch_size)
    return train_dataset


def build_and_compile_cnn_model():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(28, 28)),
            tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, activation="relu"),
            tf.keras.layers.Dense(10),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.001),
        metrics=["accuracy"],
    )
    return model
