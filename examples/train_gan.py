"""Trains a GAN (DCGAN) that draws digits or clothes, in two ways: a `train_step` under `fit`, or a loop of its own.

Images are the handwritten digits that come with scikit-learn (`pip install scikit-learn`), so nothing is downloaded;
`--dataset fashion_mnist` takes those of keras.datasets, which are downloaded once: run it alone for the first time.

The noise comes with the data and is not drawn in the step, and the statistics of BatchNormalization are synchronized:
so any number of workers trains the same model.

Example:
    tfdist run -n 2 examples/train_gan.py
    tfdist run -n 2 examples/train_gan.py --loop
    srun -N2 --ntasks-per-node=8 python train_gan.py --dataset fashion_mnist --batch-size 2048 --epochs 50
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_digits

import tfdist

NOISE = 32
DATASETS = ("digits", "fashion_mnist", "mnist")


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a generator of images on one or several workers.")
    parser.add_argument("--dataset", default="digits", choices=DATASETS)
    parser.add_argument("--loop", action="store_true", help="a loop around strategy.run instead of fit")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=128, help="of all workers together (%(default)s)")
    parser.add_argument("--filters", type=int, default=32, help="of the widest layers (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--images-path", default="gan.png", help="where sample images go (%(default)s)")
    parser.add_argument("--model-path", default="generator.keras", help="where the generator goes (%(default)s)")
    parser.add_argument("--backup-dir", default="gan.backup", help="where fit saves an interrupted training")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def load(options: argparse.Namespace) -> tuple[tf.data.Dataset, int]:
    """Returns batches of images, from -1 to 1, with noise, and the height of an image."""
    if options.dataset == "digits":
        images = load_digits().images / 16
    else:
        (images, _), _ = getattr(keras.datasets, options.dataset).load_data()
        images = images / 255
    images = (2 * images[..., None] - 1).astype("float32")

    def with_noise(number: tf.Tensor, image: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return image, tf.random.stateless_normal((NOISE,), tf.stack([tf.cast(options.seed, tf.int64), number]))

    steps = len(images) // options.batch_size
    if steps < 1:
        raise SystemExit(f"received --batch-size {options.batch_size}, expected at most {len(images)}, all images")
    # Endless, so that the numbers go on from one epoch to the next, and each image meets other noise.
    dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(len(images), seed=options.seed).repeat().enumerate()
    batches = dataset.map(with_noise, tf.data.AUTOTUNE).batch(options.batch_size, drop_remainder=True)
    return batches.prefetch(tf.data.AUTOTUNE), steps


def build_generator(size: int, filters: int) -> keras.Model:
    """From noise to images."""
    return keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense((size // 4) ** 2 * 2 * filters, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.LeakyReLU(0.2),
            layers.Reshape((size // 4, size // 4, 2 * filters)),
            layers.Conv2DTranspose(filters, 4, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.LeakyReLU(0.2),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="tanh"),
        ],
        name="generator",
    )


def build_discriminator(size: int, filters: int) -> keras.Model:
    """From images to how real they look."""
    return keras.Sequential(
        [
            keras.Input((size, size, 1)),
            layers.Conv2D(filters, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Conv2D(2 * filters, 4, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


def losses_of_rows(real: tf.Tensor, made: tf.Tensor) -> dict[str, tf.Tensor]:
    """The losses of both networks, for each row, from what the discriminator says of real images and of made ones."""
    loss = tf.nn.sigmoid_cross_entropy_with_logits
    return {
        "generator": loss(tf.ones_like(made), made)[:, 0],
        "discriminator": (loss(tf.ones_like(real), real) + loss(tf.zeros_like(made), made))[:, 0],
    }


class GAN(keras.Model):
    """Both networks, with an optimizer each."""

    def __init__(self, generator: keras.Model, discriminator: keras.Model, learning_rate: float) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator
        self.optimizers = {
            name: keras.optimizers.Adam(learning_rate, beta_1=0.5) for name in ("generator", "discriminator")
        }

        self.means = {name: keras.metrics.Mean(f"{name}_loss") for name in self.optimizers}

    def call(self, noise: tf.Tensor) -> tf.Tensor:
        return self.generator(noise)

    def update(self, data: tuple[tf.Tensor, tf.Tensor], mean: Callable[[tf.Tensor], tf.Tensor]) -> None:
        """A step of both networks. `mean` makes one number of the losses of the rows."""
        images, noise = data
        with tf.GradientTape(persistent=True) as tape:
            made = self.generator(noise, training=True)
            rows = losses_of_rows(self.discriminator(images, training=True), self.discriminator(made, training=True))
            losses = {name: mean(values) for name, values in rows.items()}
        for name, loss in losses.items():
            weights = getattr(self, name).trainable_variables
            self.optimizers[name].apply(tape.gradient(loss, weights), weights)
            self.means[name].update_state(rows[name])

    def results(self) -> dict[str, tf.Tensor]:
        """The losses since the beginning of the epoch."""
        return {mean.name: mean.result() for mean in self.means.values()}

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The step of `fit`, written as for one process."""
        self.update(data, tf.reduce_mean)
        return self.results()


def train_by_loop(strategy: Any, gan: GAN, dataset: tf.data.Dataset, steps: int, rows: int, epochs: int) -> None:
    """The training of `fit`, as a loop of one's own."""

    def mean(losses: tf.Tensor) -> tf.Tensor:
        # Divided by the rows of all workers: their parts are added up.
        return tf.nn.compute_average_loss(losses, global_batch_size=rows)

    @tf.function
    def train(data: Any) -> None:
        strategy.run(lambda batch: gan.update(batch, mean), args=(data,))

    batches = iter(strategy.experimental_distribute_dataset(dataset))
    for epoch in range(epochs):
        for _ in range(steps):
            train(next(batches))
        # On every worker: it adds up what each of them has counted.
        losses = " - ".join(f"{name}: {float(loss):.4f}" for name, loss in gan.results().items())
        print(f"Epoch {epoch + 1}/{epochs}\n{steps}/{steps} - {losses}")
        for metric in gan.means.values():
            metric.reset_state()


def save_images(images: np.ndarray, path: str, columns: int = 8) -> None:
    """Writes images, side by side, as a PNG file."""
    pixels = np.clip(np.rint(127.5 * (images + 1)), 0, 255).astype("uint8")
    rows = [np.concatenate(list(pixels[start : start + columns]), axis=1) for start in range(0, len(pixels), columns)]
    tf.io.write_file(path, tf.io.encode_png(np.concatenate(rows)))


def main() -> None:
    """Trains, draws and saves."""
    options = parse_arguments()
    # First of all: the workers must find each other before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(options.seed)
    dataset, steps = load(options)
    size = dataset.element_spec[0].shape[1]
    with strategy.scope():
        gan = GAN(
            build_generator(size, options.filters), build_discriminator(size, options.filters), options.learning_rate
        )
        # Before a loop, variables of optimizers have to be there.
        for name, optimizer in gan.optimizers.items():
            optimizer.build(getattr(gan, name).trainable_variables)
        gan.compile()
    if options.loop:
        train_by_loop(strategy, gan, dataset, steps, options.batch_size, options.epochs)
    else:
        backup = tfdist.callbacks.BackupAndRestore(options.backup_dir)
        gan.fit(dataset, epochs=options.epochs, steps_per_epoch=steps, shuffle=False, callbacks=[backup], verbose=2)

    # Every worker predicts and saves; the chief writes the files.
    images = gan.generator.predict(np.random.default_rng(options.seed).normal(size=(64, NOISE)), verbose=0)
    if strategy.is_chief:
        save_images(images, options.images_path)
    gan.generator.save(options.model_path)
    print(f"drew {len(images)} images: {options.images_path}; saved as {options.model_path}")


if __name__ == "__main__":
    main()
