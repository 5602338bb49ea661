"""Trains on several workers, exports a SavedModel, and answers requests for predictions in a process without Keras.

The server here has the addresses and the JSON of TensorFlow Serving, which takes the same folder:

    docker run -p 8501:8501 -v "$PWD/served:/models/digits" -e MODEL_NAME=digits tensorflow/serving
    curl -d '{"instances": [[...], ...]}' http://localhost:8501/v1/models/digits:predict

Images are the handwritten digits that come with scikit-learn (`pip install scikit-learn`): nothing is downloaded.

Example:
    tfdist run -n 2 examples/export_and_serve.py
    python examples/export_and_serve.py --serve --port 8501
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

NAME = "digits"


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train, export and serve an image classifier.")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=60, help="of all workers together (%(default)s)")
    parser.add_argument(
        "--export-dir", type=Path, default=Path("served"), help="folder of the exported models (%(default)s)"
    )
    parser.add_argument("--serve", action="store_true", help="serve the newest exported model, and train nothing")
    parser.add_argument("--host", default="127.0.0.1", help="the address at which it is served (%(default)s)")
    parser.add_argument("--port", type=int, default=8501, help="0: any that is free (%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


# --- The server -----------------------------------------------------------------------------------------------------


def newest(folder: Path) -> Path:
    """The exported model with the highest number, as TensorFlow Serving chooses it."""
    versions = [path for path in folder.glob("*") if path.name.isdigit()]
    if not versions:
        raise SystemExit(f"{folder} has no exported model, expected a folder like {folder}/1: train one first")
    return max(versions, key=lambda path: int(path.name))


class Server(ThreadingHTTPServer):
    """Answers requests for the predictions of a SavedModel."""

    def __init__(self, address: tuple[str, int], folder: Path) -> None:
        # Neither Keras nor tfdist is needed, nor the code that made the model.
        self.model = tf.saved_model.load(str(folder))
        self.version = folder.name
        super().__init__(address, Requests)

    def predict(self, request: Any) -> dict[str, Any]:
        """The answer to `{"instances": [...]}`.

        Raises:
            ValueError: for what the model cannot take.
        """
        if not isinstance(request, dict) or not isinstance(request.get("instances"), list):
            raise ValueError('expected {"instances": [one, another, ...]}')
        return {"predictions": self.model.serve(tf.constant(request["instances"], tf.float32)).numpy().tolist()}


class Requests(BaseHTTPRequestHandler):
    """`GET /v1/models/digits` tells the state, `POST /v1/models/digits:predict` predicts."""

    server: Server

    def do_GET(self) -> None:
        if self.path != f"/v1/models/{NAME}":
            return self._answer(404, {"error": f"there is no {self.path}, but /v1/models/{NAME}"})
        status = {"error_code": "OK", "error_message": ""}
        state = {"version": self.server.version, "state": "AVAILABLE", "status": status}
        return self._answer(200, {"model_version_status": [state]})

    def do_POST(self) -> None:
        if self.path != f"/v1/models/{NAME}:predict":
            return self._answer(404, {"error": f"there is no {self.path}, but /v1/models/{NAME}:predict"})
        try:
            request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            return self._answer(200, self.server.predict(request))
        except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
            return self._answer(400, {"error": str(error)})

    def _answer(self, code: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Prints nothing for each request."""


def serve(options: argparse.Namespace) -> None:
    """Serves until it is stopped."""
    with Server((options.host, options.port), newest(options.export_dir)) as server:
        print(f"serving http://{options.host}:{server.server_port}/v1/models/{NAME}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


# --- The training ---------------------------------------------------------------------------------------------------


def train(options: argparse.Namespace) -> None:
    """Trains, exports, and compares what is served with what the model predicts."""
    import keras
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    import tfdist

    # First of all: the workers must find each other before TensorFlow does anything else.
    strategy = tfdist.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(options.seed)
    pixels, labels = load_digits(return_X_y=True)
    images, test_images, labels, test_labels = train_test_split(
        pixels.reshape(-1, 8, 8, 1).astype("float32"), labels, test_size=297, stratify=labels, random_state=1
    )
    with strategy.scope():
        # It takes pixels as they are, so that who asks for a prediction need not know how they are scaled.
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Rescaling(1 / 16),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10, activation="softmax"),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(images, labels, batch_size=options.batch_size, epochs=options.epochs, verbose=2)
    expected = model.predict(test_images, verbose=0)

    # Each version has a number; the server takes the highest. Every worker exports; the chief writes the files.
    folder = options.export_dir / "1"
    model.export(folder, verbose=False)
    if strategy.is_chief:
        difference = np.abs(ask_server(options, test_images) - expected).max()
        print(f"served predictions differ by {difference:.1e} at most")
    # All workers take part, so the others wait here for the chief.
    _, accuracy = model.evaluate(test_images, test_labels, verbose=0)
    print(f"test accuracy: {accuracy:.3f}; exported: {folder}")


def ask_server(options: argparse.Namespace, images: np.ndarray) -> np.ndarray:
    """What a server answers, in a process of its own."""
    command = [sys.executable, __file__, "--serve", "--port", "0", "--export-dir", str(options.export_dir)]
    # On the CPU: the memory of a GPU is this process'.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    try:
        line = server.stdout.readline() if server.stdout else ""
        if not line.startswith("serving "):
            raise SystemExit(f"the server printed {line!r}, expected its address")
        address = line.split()[-1]
        data = json.dumps({"instances": images.tolist()}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{address}:predict", data), timeout=60) as answer:
            return np.array(json.load(answer)["predictions"])
    finally:
        # TensorFlow does not heed SIGTERM at all times.
        server.kill()
        server.wait()


def main() -> None:
    """Trains or serves."""
    options = parse_arguments()
    if options.serve:
        serve(options)
    else:
        train(options)


if __name__ == "__main__":
    main()
