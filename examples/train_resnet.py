"""Trains ResNet-50 on sharded TFRecord files, with augmentation, mixed precision and XLA: plain Keras.

Images come from `--data`, a folder of TFRecord files. This script writes it, once, from JPEG files in a folder for each
class: `IMAGES/train/CLASS/*.jpg` and `IMAGES/validation/CLASS/*.jpg`. ImageNet (ILSVRC 2012) comes from
https://www.kaggle.com/c/imagenet-object-localization-challenge, or, after registration, from https://image-net.org.
Move its validation images into folders of their classes first, by the list that comes with them. `--synthetic` takes no
data: it makes small JPEG images, whose classes differ in their colour, and nothing is downloaded.

Each process makes batches of `--batch-size` images, of which it trains on its part: float32, 0.6 MB an image of 224.

Example:
    tfdist run -n 2 examples/train_resnet.py --synthetic --model small --image-size 32 --epochs 3 --warm-up 1
    python examples/train_resnet.py --write-records imagenet --data records --shards 1024
    tfdist run train_resnet.py --data records --batch-size 1024 --precision mixed_float16  # a process for each GPU
    srun -K -N2 --ntasks-per-node=8 python train_resnet.py --data records --batch-size 4096 --precision mixed_float16
"""

from __future__ import annotations

import argparse
import colorsys
import functools
import json
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import tfdist

# Of ImageNet's pixels: red, green and blue.
MEAN, DEVIATION = (123.68, 116.78, 103.94), (58.39, 57.12, 57.38)
SYNTHETIC_CLASSES, SYNTHETIC_IMAGES = 8, {"train": 512, "validation": 128}


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train an image classifier on one or several workers.")
    parser.add_argument("--data", type=Path, help="folder of the TFRecord files")
    parser.add_argument("--synthetic", action="store_true", help="train on images that are made up")
    parser.add_argument("--write-records", type=Path, metavar="IMAGES", help="only write the files of --data")
    parser.add_argument("--shards", type=int, default=16, help="files to write for each split (%(default)s)")
    parser.add_argument("--model", default="ResNet50", help="a class of keras.applications, or small (%(default)s)")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together (%(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="for 256 rows a batch (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=5, help="epochs until it is reached (%(default)s)")
    parser.add_argument(
        "--precision", default="float32", choices=["float32", "mixed_bfloat16", "mixed_float16"], help="(%(default)s)"
    )
    parser.add_argument("--xla", action="store_true", help="compile the training step (default: on GPUs)")
    parser.add_argument(
        "--read",
        default="own",
        choices=["own", "all"],
        help="own: each worker reads some of the files (default); all: everything, as one process would",
    )
    parser.add_argument("--model-path", default="resnet.keras", help="where the best model goes (%(default)s)")
    parser.add_argument("--backup-dir", default="resnet.backup", help="where an interrupted training is saved")
    parser.add_argument("--save-freq", type=int, help="steps from one backup to the next (default: an epoch)")
    parser.add_argument("--tensorboard", metavar="FOLDER", help="where logs for TensorBoard go")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.write_records and not options.data:
        parser.error("received --write-records without --data, expected both: where do the files go?")
    if bool(options.data) == options.synthetic:
        parser.error("expected either --data FOLDER or --synthetic")
    return options


# --- The files ------------------------------------------------------------------------------------------------------


def example_of(jpeg: bytes, label: int) -> bytes:
    """An image and its class, as it is in a file."""
    features = {
        "image": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg])),
        "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
    }
    return tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString()


def jpeg_of(path: Path) -> bytes:
    """The image in a file. ImageNet has a PNG file that is named .JPEG."""
    content = path.read_bytes()
    if content.startswith(b"\xff\xd8"):
        return content
    return tf.io.encode_jpeg(tf.io.decode_image(content, channels=3, expand_animations=False)).numpy()


def write_records(images: Path, data: Path, shards: int, seed: int) -> None:
    """Writes TFRecord files of the images in folders, and what is in them."""
    classes = sorted(path.name for path in (images / "train").glob("*") if path.is_dir())
    if not classes:
        raise SystemExit(f"{images}/train has no folders, expected one for each class")
    data.mkdir(parents=True, exist_ok=True)
    info: dict[str, object] = {"classes": classes}
    found = {
        split: [
            (path, label)
            for label, name in enumerate(classes)
            for path in sorted((images / split / name).glob("*"))
            if path.suffix.lower() in (".jpg", ".jpeg")
        ]
        for split in ("train", "validation")
    }
    for split, files in found.items():  # both, before hours go into the first one
        if len(files) < shards:
            raise SystemExit(f"{images}/{split}/CLASS has {len(files)} JPEG files, expected --shards {shards} or more")
    for split, files in found.items():
        # Each file has images of all classes: the reader's shuffle buffer holds but a small part of the whole.
        np.random.default_rng(seed).shuffle(files)

        def write(shard: int, split: str = split, files: list[tuple[Path, int]] = files) -> None:
            with tf.io.TFRecordWriter(str(data / f"{split}-{shard:05d}-of-{shards:05d}.tfrecord")) as writer:
                for path, label in files[shard::shards]:
                    writer.write(example_of(jpeg_of(Path(path)), int(label)))

        with ThreadPoolExecutor() as pool:
            list(pool.map(write, range(shards)))
        info[split] = len(files)
        print(f"{split}: {len(files)} images of {len(classes)} classes in {shards} files")
    (data / "info.json").write_text(json.dumps(info))


def make_images(split: str, size: int) -> Iterator[bytes]:
    """Made-up images, as they would be in a file: a disc on a grey, noisy ground, whose colour is the class."""
    generator = np.random.default_rng(split == "train")
    rows, columns = np.mgrid[:size, :size]
    for index in range(SYNTHETIC_IMAGES[split]):
        label = index % SYNTHETIC_CLASSES
        colour = 255 * np.array(colorsys.hsv_to_rgb(label / SYNTHETIC_CLASSES, 0.8, generator.uniform(0.5, 1.0)))
        row, column = generator.uniform(0.35 * size, 0.65 * size, 2)
        disc = (rows - row) ** 2 + (columns - column) ** 2 < (0.3 * size) ** 2
        pixels = np.where(disc[..., None], colour, 128) + generator.normal(0, 20, (size, size, 3))
        yield example_of(tf.io.encode_jpeg(np.clip(pixels, 0, 255).astype("uint8")).numpy(), label)


# --- The input pipeline ---------------------------------------------------------------------------------------------


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """A JPEG image and its class."""
    features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
    found = tf.io.parse_single_example(record, features)
    return found["image"], found["label"]


def augment(jpeg: tf.Tensor, seed: tf.Tensor, size: int) -> tf.Tensor:
    """A part of the image, of random size and place, and perhaps mirrored; only that part is decoded."""
    corner, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(jpeg),
        tf.constant([[[0.0, 0.0, 1.0, 1.0]]]),
        seed,
        min_object_covered=0.0,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.25, 1.0),
    )
    image = tf.io.decode_and_crop_jpeg(jpeg, tf.concat([corner[:2], extent[:2]], axis=0), channels=3)
    return tf.image.stateless_random_flip_left_right(tf.image.resize(image, (size, size)), seed)


def centre(jpeg: tf.Tensor, size: int) -> tf.Tensor:
    """The middle of the image."""
    shape = tf.io.extract_jpeg_shape(jpeg)
    edge = tf.cast(tf.cast(tf.minimum(shape[0], shape[1]), tf.float32) * 0.875, tf.int32)
    window = tf.stack([(shape[0] - edge) // 2, (shape[1] - edge) // 2, edge, edge])
    return tf.image.resize(tf.io.decode_and_crop_jpeg(jpeg, window, channels=3), (size, size))


def records_of(options: argparse.Namespace, split: str) -> tuple[tf.data.Dataset, int]:
    """The records of a split as a dataset of datasets, one for each file, and how many files there are."""
    if options.synthetic:
        made = tf.data.Dataset.from_tensor_slices(list(make_images(split, max(options.image_size, 32))))
        files = 8
        return tf.data.Dataset.range(files).map(lambda number: made.shard(files, number)), files
    names = sorted(map(str, options.data.glob(f"{split}-*.tfrecord")))
    if not names:
        raise SystemExit(f"{options.data} has no files {split}-*.tfrecord: write them with --write-records")
    return tf.data.Dataset.from_tensor_slices(names).map(tf.data.TFRecordDataset), len(names)


def load_training(options: argparse.Namespace, classes: int, steps: int, epoch: int) -> tf.data.Dataset:
    """The batches of an epoch. All that is drawn depends on the seed and the epoch: no epoch needs those before it."""
    seed, rank = options.seed + 1000 * epoch, 0
    files, count = records_of(options, "train")
    cluster = tfdist.discover()
    shared = options.read == "own" and not cluster.is_single_process
    if shared:
        if count < cluster.num_workers:
            raise SystemExit(
                f"received {count} files for {cluster.num_workers} workers, expected at least one for each of them: "
                "write more --shards, or read them with --read all"
            )
        rank = cluster.rank
        files = files.shard(cluster.num_workers, rank)
    files = files.shuffle(count, seed=seed)
    records = files.interleave(lambda records: records, cycle_length=16, num_parallel_calls=tf.data.AUTOTUNE)
    if shared:
        # Some workers have fewer images than others, and all have to do as many steps.
        records = records.repeat()

    def prepare(number: tf.Tensor, record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        jpeg, label = parse(record)
        # Not from a generator with a state: the same in every run, and on all workers that read the same.
        image = augment(
            jpeg, tf.stack([tf.constant(seed + 1_000_000_007 * rank, tf.int64), number]), options.image_size
        )
        return tf.ensure_shape(image, (options.image_size, options.image_size, 3)), tf.one_hot(label, classes)

    batches = (
        records.shuffle(16 * 1024, seed=seed)
        .enumerate()
        .map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(options.batch_size, drop_remainder=True)
        .take(steps)
        .apply(tf.data.experimental.assert_cardinality(steps))
        .prefetch(tf.data.AUTOTUNE)
    )
    if shared:
        # Each worker's rows come from its own files: it must not be given a part of them.
        settings = tf.data.Options()
        settings.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        batches = batches.with_options(settings)
    return batches


def load_validation(options: argparse.Namespace, classes: int, images: int) -> tf.data.Dataset:
    """All held-out images, once; every worker is given all, and computes on its rows of each batch."""

    def prepare(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        jpeg, label = parse(record)
        image = tf.ensure_shape(centre(jpeg, options.image_size), (options.image_size, options.image_size, 3))
        return image, tf.one_hot(label, classes)

    files, _ = records_of(options, "validation")
    records = files.interleave(lambda records: records, num_parallel_calls=tf.data.AUTOTUNE)
    batches = records.map(prepare, num_parallel_calls=tf.data.AUTOTUNE).batch(options.batch_size)
    known = tf.data.experimental.assert_cardinality(math.ceil(images / options.batch_size))
    return batches.apply(known).prefetch(tf.data.AUTOTUNE)


# --- The model ------------------------------------------------------------------------------------------------------


def small_network(images: keras.KerasTensor) -> keras.KerasTensor:
    """A little residual network, for a trial without a GPU."""
    x = images
    for filters in (16, 32, 64):
        short = layers.Conv2D(filters, 1, 2, use_bias=False)(x)
        x = layers.Conv2D(filters, 3, 2, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(layers.BatchNormalization()(x))
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.Activation("relu")(layers.BatchNormalization()(x) + short)
    return layers.GlobalAveragePooling2D()(x)


def build_model(options: argparse.Namespace, classes: int, steps: int) -> keras.Model:
    """Builds the network, which takes pixels from 0 to 255, and compiles it."""
    images = keras.Input((options.image_size, options.image_size, 3))
    x = layers.Normalization(mean=MEAN, variance=np.square(DEVIATION))(images)
    if options.model == "small":
        x = small_network(x)
    else:
        network = getattr(keras.applications, options.model)
        x = network(weights=None, include_top=False, pooling="avg", input_shape=x.shape[1:])(x)
    # The loss is computed in float32, whatever the precision.
    logits = layers.Dense(classes, dtype="float32")(x)
    model = keras.Model(images, logits)
    # With n times as many rows a batch, n times the learning rate, reached step by step (Goyal et al. 2017).
    rate = keras.optimizers.schedules.CosineDecay(
        initial_learning_rate=0.0,
        warmup_target=options.learning_rate * options.batch_size / 256,
        warmup_steps=max(1, options.warm_up * steps),
        decay_steps=max(1, (options.epochs - options.warm_up) * steps),
    )
    model.compile(
        optimizer=keras.optimizers.SGD(rate, momentum=0.9, nesterov=True, weight_decay=1e-4),
        loss=keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(5, name="top_5")],
        jit_compile=True if options.xla else "auto",
    )
    return model


def main() -> None:
    """Writes the files, or trains and evaluates."""
    options = parse_arguments()
    if options.write_records:
        write_records(options.write_records, options.data, options.shards, options.seed)
        return
    # First of all: the workers must find each other before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(options.seed)
    keras.config.set_dtype_policy(options.precision)

    if options.synthetic:
        classes, images = SYNTHETIC_CLASSES, SYNTHETIC_IMAGES
    else:
        images = json.loads((options.data / "info.json").read_text())
        classes = len(images["classes"])
    steps = images["train"] // options.batch_size
    if steps < 1:
        raise SystemExit(f"received --batch-size {options.batch_size}, expected at most {images['train']}, all images")
    training = functools.partial(load_training, options, classes, steps)
    validation = load_validation(options, classes, images["validation"])
    with strategy.scope():
        model = build_model(options, classes, steps)
    callbacks = [
        # Killed and started again, it goes on where it was; once it has finished, the next start begins again.
        # `dataset_fn` makes the data of that epoch at once, instead of reading what came before.
        tfdist.callbacks.BackupAndRestore(
            options.backup_dir, save_freq=options.save_freq or "epoch", dataset_fn=training
        ),
        keras.callbacks.ModelCheckpoint(options.model_path, monitor="val_accuracy", mode="max", save_best_only=True),
    ]
    if options.tensorboard:
        callbacks.append(tfdist.callbacks.TensorBoard(options.tensorboard))
    history = model.fit(
        training(epoch=0),
        validation_data=validation,
        epochs=options.epochs,
        shuffle=False,  # the dataset shuffles itself
        callbacks=callbacks,
        verbose=2,
    )

    _, accuracy, top_5 = model.evaluate(validation, verbose=0)
    best = max(history.history["val_accuracy"])
    print(f"validation accuracy: {accuracy:.3f}, top 5: {top_5:.3f}; the best, {best:.3f}, is in {options.model_path}")


if __name__ == "__main__":
    main()
