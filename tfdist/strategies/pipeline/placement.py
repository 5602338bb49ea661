"""Which device has what: the stages, their variables, and the operations that follow the variables.

`pipeline_devices` finds a device for each stage. `move` and `move_slots` put variables and optimizers' slots on the
device of their stage. `near_inputs` and `local_optimizers` keep the work of optimizers and of users' steps where the
data are: Keras computes clipping, averages and updates without saying where, and TensorFlow puts what nobody places on
the first device, so that every gradient would travel there and back.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.cluster.config import ClusterConfig
from tfdist.cluster.discovery import discover
from tfdist.cluster.errors import ClusterError
from tfdist.inspection.model_state import all_optimizers_of
from tfdist.runtime.servers import connect, serve
from tfdist.steps.keras_step import shadowed
from tfdist.strategies.validation import check_cluster, existing_device, own_devices

_DEVICE = (str, tf.config.LogicalDevice)


def pipeline_devices(
    devices: Sequence[Any] | None,
    replicas: int | None,
    cluster: ClusterConfig | None,
    start_timeout: float,
) -> list[list[str]]:
    """The device of each stage, for each pipeline. In the workers of a cluster other than the chief it does not return.

    Args:
        devices: what the user wants, as strings or `tf.config.LogicalDevice`s. By default one device of each worker if
            the cluster has several, otherwise all GPUs of this process, otherwise all its logical CPU devices. A list
            of lists has one pipeline in each.
        replicas: the number of pipelines that a flat list, or the devices that are found, are dealt out to.
        cluster: the cluster; by default what `tfdist.discover()` finds.
        start_timeout: how long to wait for the cluster's processes, in seconds.

    Raises:
        ValueError: for a device that does not exist, or devices that do not make equally long pipelines.
        tfdist.ClusterError: if a process of the cluster does not come.
    """
    check_cluster(cluster)
    config = cluster or discover(timeout=start_timeout)
    if config.num_workers > 1 and config.task_type not in ("chief", "worker"):
        raise ClusterError(
            f"Received: task {config.task_type} {config.task_index}. Expected: chief or worker, which a pipeline has "
            "its stages on. Start the job without other tasks: `tfdist run --stages N`."
        )
    if isinstance(devices, (int, *_DEVICE)):
        raise ValueError(
            f"Received: devices={devices!r}. Expected: a list with a device for each stage, such as ['GPU:0', 'GPU:1']."
        )
    replicas = int(os.environ.get("TFDIST_REPLICAS") or 1) if replicas is None else replicas
    found = None
    if config.num_workers > 1:
        if config.rank > 0:
            serve(config, start_timeout)
        stages = max(1, config.num_workers // max(1, replicas))
        found = connect(config, start_timeout, lambda rank: f"stage {rank % stages}")
    if devices is not None and not all(isinstance(device, _DEVICE) for device in devices):
        rows = [[_checked(device) for device in row] for row in devices]
        if not rows or not rows[0] or len({len(row) for row in rows}) > 1 or replicas not in (1, len(rows)):
            raise ValueError(
                f"Received: devices={devices!r} with replicas={replicas}. Expected: equally many devices, one a stage, "
                "in each of the inner lists, one a pipeline."
            )
        return rows
    flat = [_checked(device) for device in devices] if devices is not None else found or own_devices()
    if replicas < 1 or len(flat) % replicas or not flat:
        raise ValueError(
            f"Received: {len(flat)} devices for replicas={replicas}. Expected: a multiple of the number of "
            "replicas, each of which is a pipeline with one stage a device."
        )
    stages = len(flat) // replicas
    return [flat[i : i + stages] for i in range(0, len(flat), stages)]


def _checked(device: Any) -> str:
    return existing_device(
        device,
        "For more CPU devices in one process call tf.config.set_logical_device_configuration before anything else; for "
        "workers' devices start the program with `tfdist run --stages N`.",
    )


def move(variable: keras.Variable, device: str) -> None:
    """Replaces the TensorFlow variable inside of a Keras variable by one on another device, with the same value.

    A TensorFlow variable cannot change its device. Optimizers know it by its id and its name, as what has slots, or no
    weight decay, or another optimizer of several: the new one has the same.
    """
    old = variable._value
    if tf.DeviceSpec.from_string(old.device) == _full(device):
        return
    # With a slash at its end, a name is taken as it is.
    name = f"{old.name.partition(':')[0]}/"
    with tf.init_scope(), tf.device(device):
        # Not `tf.Variable`, which would ask the strategy for a device where a fit is in its scope.
        new = type(old)(
            tf.identity(old), dtype=old.dtype, trainable=old.trainable, name=name, aggregation=old.aggregation
        )
    new._unique_id = new.handle._unique_id = old._unique_id
    variable._value = new


def move_slots(model: keras.Model, owners: dict[str, str], moved: dict[str, keras.Variable]) -> None:
    """Moves the slots of a model's optimizers to the devices of their variables, which have moved already.

    Args:
        model: the model.
        owners: for each slot, the variable it belongs to, by the ids of their TensorFlow variables.
        moved: the Keras variables that have moved, by the ids of their TensorFlow variables.
    """
    for part in all_optimizers_of(model):
        for slot in part.variables:
            if (variable := moved.get(owners.get(slot._value._unique_id))) is not None:
                move(slot, variable._value.device)


def _full(device: str) -> tf.DeviceSpec:
    """A device string with job, replica and task, as variables have it."""
    with tf.init_scope(), tf.device(device):
        return tf.DeviceSpec.from_string(tf.constant(0.0).device)


@contextlib.contextmanager
def near_inputs() -> Iterator[None]:
    """Places each operation of the block that has no device of its own.

    It goes to the device of the variable that it reads or writes, if there is one, otherwise of its largest input.
    """
    with tf.compat.v1.device(_device_for):
        yield


def _device_for(operation: tf.Operation) -> str:
    # TensorFlow calls it for each new operation. An operation with a variable has to be on the device of the variable;
    # for any other, the largest input is the transfer that is worth saving.
    if operation.device:
        return operation.device
    resources = [t for t in operation.inputs if t.dtype == tf.resource]
    candidates = resources or sorted(operation.inputs, key=_elements, reverse=True)
    return next((device for device in map(_device_of, candidates) if device), "")


def _elements(tensor: tf.Tensor) -> int:
    return math.prod(size or 1 for size in tensor.shape) if tensor.shape.rank else 1


def _device_of(tensor: Any) -> str:
    if not tf.is_symbolic_tensor(tensor):
        return tensor.device
    if tensor.op.device or tensor.op.type != "Placeholder":
        return tensor.op.device
    # A placeholder of a function for a tensor outside of it: where that is.
    for outside, inside in getattr(tensor.graph, "captures", ()):
        if inside is tensor:
            return _device_of(outside)
    return ""


class LocalScalars:
    """Copies of an optimizer's step counter and learning rate on the devices of the variables, for one update.

    The update of each variable reads both. Without copies it would read them from another process, each time.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        rate = getattr(optimizer, "_learning_rate", None)
        self._scalars = [v for v in (optimizer._iterations, rate) if isinstance(v, keras.Variable)]
        self._copies: dict[tuple[Any, str], list[tf.Tensor]] = {}

    @contextlib.contextmanager
    def on(self, device: str) -> Iterator[None]:
        """Within the block, reading the scalars gives their copies on this device, which is the current one."""
        key = tf.compat.v1.get_default_graph(), device
        if key not in self._copies:
            self._copies[key] = [tf.identity(v._value) for v in self._scalars]
        given = list(zip(self._scalars, self._copies[key], strict=True))
        with keras.StatelessScope(given, initialize_variables=False) as scope:
            yield
        # What an optimizer has assigned to a variable of its own by Keras' methods, the scope has kept: write it now.
        before = {id(v): value for v, value in given}
        for variable in self._optimizer.variables:
            value = scope.get_current_value(variable)
            if value is not None and value is not before.get(id(variable)):
                variable._value.assign(value)


@contextlib.contextmanager
def local_optimizers(model: keras.Model, extended: Any) -> Iterator[None]:
    """While the block runs, a model's optimizers leave gradients where they are and read their scalars once."""
    with contextlib.ExitStack() as stack:
        for part in all_optimizers_of(model):
            if isinstance(getattr(part, "_iterations", None), keras.Variable):
                stack.enter_context(shadowed(part, _distributed_tf_update_step=_with_scalars(part, extended)))
        yield


def _with_scalars(optimizer: Any, extended: Any) -> Callable:
    original = optimizer._distributed_tf_update_step

    def update(distribution: Any, grads_and_vars: Sequence[Any], learning_rate: Any) -> None:
        with shadowed(extended, scalars=LocalScalars(optimizer)):
            original(distribution, grads_and_vars, learning_rate)

    return update
