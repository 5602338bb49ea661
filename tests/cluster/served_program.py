"""A program that one process drives and others serve: `python -m tests.cluster.served_program WHAT`."""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import tensorflow as tf
from tensorflow.python.eager import context

from tfdist.cluster import ClusterConfig, ClusterError, discover
from tfdist.runtime.servers import await_servers, connect, serve

SIZE = 50
START_TIMEOUT = 90.0


def tell(**found: object) -> None:
    """One line of what the test asserts."""
    # In one piece: a thread of tfdist's, and other processes, write to the same log.
    os.write(1, f"\n{json.dumps(found)}\n".encode())


def wait_for(name: str) -> None:
    """Waits until the test, or another process, has made a file."""
    while not Path(name).exists():
        time.sleep(0.01)


class Chain:
    """Matrices on one device after the other, each twice the unit matrix."""

    def __init__(self, devices: list[str]) -> None:
        self.devices = devices
        self.weights = []
        for device in devices:
            with tf.device(device):
                self.weights.append(tf.Variable(2.0 * tf.eye(SIZE)))

    def through(self, x: tf.Tensor) -> tf.Tensor:
        for device, weight in zip(self.devices, self.weights, strict=True):
            with tf.device(device):
                x = tf.matmul(x, weight)
        return x

    @tf.function
    def step(self) -> tf.Tensor:
        """SIZE ** 2 times 2 ** len(devices)."""
        return tf.reduce_sum(self.through(tf.ones((SIZE, SIZE))))

    @tf.function
    def endless(self, on_turn: Callable[[], None]) -> tf.Tensor:
        """Calls a function after each turn through all devices."""
        x = tf.ones((SIZE, SIZE))
        while tf.reduce_sum(x) > 0.0:
            x = tf.math.sign(self.through(x))
            with tf.device(self.devices[0]), tf.control_dependencies([x]):
                tf.py_function(on_turn, [], [])
        return x


def steps(cluster: ClusterConfig) -> None:
    """A few steps, then idle until the test says so."""
    devices = connect(cluster, START_TIMEOUT)
    tell(devices=devices, again=connect(cluster, START_TIMEOUT) == devices)
    try:
        connect(ClusterConfig({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}), START_TIMEOUT)
    except ClusterError as error:
        tell(other=str(error))
    chain = Chain(devices)
    tell(sums=[float(chain.step()) for _ in range(3)])
    wait_for("stop")
    tell(sums=[float(chain.step())])


def endless(cluster: ClusterConfig) -> None:
    """A step that lasts until a server dies, then another one."""
    chain = Chain(connect(cluster, START_TIMEOUT, role=lambda rank: f"stage {rank}"))
    chain.step()
    turns = itertools.count()

    def on_turn() -> None:
        if next(turns) == 0:
            tell(running=True)

    for step in (functools.partial(chain.endless, on_turn), chain.step):
        try:
            step()
        except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
            tell(raised=type(error).__name__)
    wait_for("stop")


class Pool:
    """A variable on the parameter server, read by the workers."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self.back = threading.Event()
        await_servers(cluster, START_TIMEOUT, self._on_gone, self._on_back)
        jobs = {name: dict(cluster.jobs[name]) for name in ("chief", "worker", "ps")}
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(jobs), job_name="chief", task_index=0)
        self._workers = list(cluster.jobs["worker"])
        with tf.device("/job:ps/task:0"):
            self._variable = tf.Variable(20.0)

    def read(self) -> list[float]:
        """The variable, plus one and the number of the worker, as computed by each worker."""
        found = []
        for index in self._workers:
            with tf.device(f"/job:worker/task:{index}"):
                found.append(float(self._variable.read_value() + (1.0 + index)))
        return found

    def reconnect(self) -> None:
        """Makes a worker that has come back known to the chief's runtime."""
        context.context().update_server_def(context.get_server_def())

    def _on_gone(self, job: str, index: int) -> None:
        tell(gone=f"{job} {index}")

    def _on_back(self, job: str, index: int) -> None:
        tell(back=f"{job} {index}")
        self.back.set()


def pool(cluster: ClusterConfig) -> None:
    """Reads from the parameter server, and again whenever a worker has come back, until the test says stop."""
    servers = Pool(cluster)
    tell(read=servers.read())
    await_servers(cluster, START_TIMEOUT, print)
    for other in (ClusterConfig({"worker": ["127.0.0.1:1", "127.0.0.1:2"]}), cluster):
        try:
            connect(other, START_TIMEOUT)
        except ClusterError as error:
            tell(other=str(error))
    while not Path("stop").exists():
        if servers.back.wait(0.05):
            servers.back.clear()
            servers.reconnect()
            tell(read=servers.read())


def main(what: str) -> None:
    cluster = discover()
    if cluster.rank == 0:
        {program.__name__: program for program in (steps, endless, pool)}[what](cluster)
    else:
        serve(cluster, START_TIMEOUT)


if __name__ == "__main__":
    main(sys.argv[1])
