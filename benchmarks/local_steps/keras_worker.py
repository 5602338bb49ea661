"""A worker of Keras and tfdist, alone or one of two."""

from __future__ import annotations

from benchmarks.network.windows import Windows


def main(settings: dict) -> dict | None:
    """Trains, and lets the chief return how long the steps of each window took."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks.data_parallel.keras_training import keras_layer
    from benchmarks.data_parallel.models import LEARNING_RATE, MODELS, MOMENTUM, make_batch

    shape = MODELS[settings["model"]]
    if local := settings["sync_every"]:
        strategy = tfdist.LocalStepsStrategy(local, fragments=settings["fragments"])
    else:
        strategy = tfdist.MultiWorkerMirroredStrategy()
    batch = make_batch(shape, settings["batch"] * settings["processes"])
    dataset = tf.data.Dataset.from_tensors(batch).repeat()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras_layer(keras, layer) for layer in shape.layers]
        model = keras.Sequential([keras.Input(shape.input_shape), *layers])
        optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    found = Windows({**settings, "warmup": settings["steps"]}, settings["processes"] == 1).of_fit(model, dataset)
    return found if strategy.is_chief else None
