"""Refuses, with the reason and the remedy, what cannot be right: devices, clusters, models before Keras runs them."""

from __future__ import annotations

import contextlib
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.cluster.config import ClusterConfig
from tfdist.compat.keras import has_hooks
from tfdist.inspection.model_state import all_optimizers_of, metrics_of, optimizers_of, seed_generators_of
from tfdist.runtime.job import joined
from tfdist.steps.keras_step import recognise_step

# Strategies of one process for which models are expected that have not come yet.
_unused: weakref.WeakSet[tf.distribute.Strategy] = weakref.WeakSet()
# Packages whose lines are not the user's.
_INNER = ("tfdist", "keras")

# Where the devices of a process are that is in no cluster; TensorFlow leaves it out of their names, strategies do not.
_ALONE = "/job:localhost/replica:0/task:0"
# With Keras 3, `horovod.keras.DistributedOptimizer` overrides a method that Keras no longer calls: it reduces nothing,
# says nothing, and the ranks drift apart. Horovod's callbacks read attributes that Keras 3 does not have.
_EXPECTED = (
    "Expected: plain Keras code in the scope of tfdist's strategy, which averages the gradients, broadcasts the "
    "variables and averages the metrics itself: `with tfdist.HorovodStrategy().scope(): model = ...; "
    "model.compile(optimizer='adam', ...)`"
)


def check(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Checks a compiled model whose replicas share batches, before it is built or after.

    Raises:
        ValueError: if it cannot be trained under this strategy.
    """
    if strategy.num_replicas_in_sync == 1:
        return
    check_compiled(strategy, model)
    check_stateful(model)
    check_variables(strategy, {f"metric variable '{v.path}'": v for m in metrics_of(model) for v in m.variables})
    check_variables(strategy, {f"model variable '{v.path}'": v for v in model.variables})


def check_scope(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Checks in which scope a model is trained, evaluated or asked for predictions.

    Raises:
        RuntimeError: if it is that of a strategy in which the model was not made.
    """
    if tf.distribute.has_strategy() and (current := tf.distribute.get_strategy()) is not strategy:
        raise RuntimeError(
            f"Received: model '{model.name}', created in the scope of a {type(strategy).__name__}, in the scope of "
            f"another {type(current).__name__}. Expected: the scope in which the model was created, or none; with "
            "keras.distribution, the distribution that was set then."
        )


def check_compiled(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Checks what every strategy needs of a compiled model.

    Raises:
        ValueError: if a step is not a method, which tells the model, or an optimizer was created elsewhere.
    """
    for name in ("train_step", "test_step"):
        if recognise_step(getattr(model, name)) is None:
            raise ValueError(
                f"Received: a model whose {name} is {getattr(model, name)!r}, not a method of its class. "
                "Expected: a plain method, without @tf.function or other decorators (Keras compiles the step itself)."
            )
    for optimizer in all_optimizers_of(model):
        if optimizer._distribution_strategy is not strategy:
            raise ValueError(
                f"Received: optimizer '{optimizer.name}', created {_where(optimizer._distribution_strategy)}. Its "
                "variables would not follow the model's. Expected: an optimizer created in this strategy's scope, "
                "`with strategy.scope(): optimizer = ...`, or its name, `compile('adam', ...)`."
            )


def check_variables(strategy: tf.distribute.Strategy, variables: Mapping[str, Any]) -> None:
    """Checks where variables were created.

    Args:
        strategy: in whose scope they should be.
        variables: Keras' variables, by what they are called in the message.

    Raises:
        ValueError: if one was created elsewhere.
    """
    for what, variable in variables.items():
        created_under = getattr(variable.value, "_distribute_strategy", None)
        if created_under is not strategy:
            raise ValueError(
                f"Received: {what}, created {_where(created_under)}. Expected: model, metrics and loss objects are "
                "created in this strategy's scope, `with strategy.scope(): ...`, around load_model, too."
            )


def check_stateful(model: keras.Model) -> None:
    """Refuses layers with a state for each row of a batch, under a strategy that cuts batches.

    Raises:
        ValueError: for such a layer.
    """
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise ValueError(
                f"Received: layer '{layer.name}' with stateful=True, which keeps a state for each row of a batch, "
                "under a strategy that cuts batches into parts. Expected: stateful=False, and states that the model "
                "takes and returns (return_state=True); or one part."
            )


def check_in_a_graph(strategy: tf.distribute.Strategy, model: keras.Model) -> None:
    """Refuses what does without TensorFlow's graph of a step, or takes all of it for one device.

    Raises:
        ValueError: for run_eagerly or jit_compile.
    """
    name = type(strategy).__name__
    if model.run_eagerly:
        raise ValueError(f"Received: run_eagerly=True under {name}. Its steps are graphs. Expected: run_eagerly=False.")
    if model.jit_compile is True:
        raise ValueError(
            f"Received: compile(jit_compile=True) under {name}. XLA compiles a step for one device, with all variables "
            "there. Expected: jit_compile=False or 'auto' (the default)."
        )


def check_float8(variables: Iterable[Any]) -> None:
    """Refuses variables that are replaced by their gradient: of several gradients, none is that of the batch.

    Raises:
        NotImplementedError: for such a variable.
    """
    for variable in variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise NotImplementedError(
                f"Received: variable '{variable.path}', which is overwritten with its gradient (float8 scaling "
                "factors). Expected: the dtype policy 'mixed_bfloat16' or 'mixed_float16'."
            )


def check_without_strategy(model: keras.Model) -> None:
    """Checks a model that was created outside of every scope, before Keras builds or runs it.

    Raises:
        ValueError: if its optimizers, metrics or variables were created in the scope of a tfdist strategy.
    """
    owners = {f"optimizer '{optimizer.name}'": optimizer._distribution_strategy for optimizer in optimizers_of(model)}
    for variable in [*model.metrics_variables, *model.variables]:
        owners[f"variable '{variable.path}'"] = getattr(variable.value, "distribute_strategy", None)
    for owner, created_under in owners.items():
        if has_hooks(created_under):
            raise ValueError(
                f"Received: model '{model.name}', created outside of strategy.scope(), with {owner}, created "
                f"in the scope of a {type(created_under).__name__}. Expected: the model is created and compiled in one "
                "scope, `with strategy.scope(): model = ...; model.compile(...)`."
            )


def expect_use(strategy: tf.distribute.Strategy) -> None:
    """Lets `warn_without_scope` warn as long as no model has used a strategy.

    Args:
        strategy: says by `_is_used` whether one has, and by `_alone` what a model without it does.
    """
    _unused.add(strategy)


def warn_without_scope() -> None:
    """Warns, once, that a model has no strategy although the program has made one."""
    job = joined()
    if job is not None and not job.warned_without_scope:
        job.warned_without_scope = _warn(
            f"Each of the {len(job.peers.names)} processes does all the work by itself, on a model of its own, and all "
            "of them write their files."
        )
    for strategy in list(_unused):
        if strategy._is_used or _warn(f"{strategy._alone}, and no model has used the {type(strategy).__name__} yet."):
            _unused.discard(strategy)


def _warn(what_happens: str) -> bool:
    """Warns at the user's line; returns whether it did."""
    frame, level = sys._getframe(), 1
    # Code that is run by `exec` may have no __name__.
    while frame.f_back is not None and (name := frame.f_globals.get("__name__", "")).split(".")[0] in _INNER:
        if name == "tfdist.testing.transparency":
            return False  # it compares with one process, and means it
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "Received: a call of fit, evaluate or predict for a model that was created outside of strategy.scope(). "
        f"{what_happens} Expected: `with strategy.scope(): model = ...; model.compile(...)`, around load_model, too, "
        "unless this is meant.",
        stacklevel=level,
    )
    return True


def warn_of_statistics(model: keras.Model, rows: str) -> None:
    """Warns, once, of layers that normalise over the rows at hand, where a strategy cuts batches and says so.

    Args:
        model: a compiled model.
        rows: which rows these are.
    """
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    paths = [layer.path or layer.name for layer in layers if layer.trainable]
    if not paths or not is_new(model, "statistics"):
        return
    others = f" and {len(paths) - 1} other(s)" if len(paths) > 1 else ""
    warnings.warn(
        f"Received: layer '{paths[0]}' (BatchNormalization){others}, which normalises over {rows}, so that training "
        "differs from one process. Expected: keras.layers.LayerNormalization or GroupNormalization; trainable=False; "
        "or parts of many rows, where the difference is small.",
        stacklevel=2,
    )


def warn_of_updates(model: keras.Model, changed: Sequence[keras.Variable], parts: int) -> None:
    """Warns, once, of state that layers assign when they are called, where they are called for each micro-batch.

    Args:
        model: a compiled model.
        changed: weights that were assigned; those of BatchNormalization and seeds are no news.
        parts: how many micro-batches there are.
    """
    layers = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    known = {id(weight) for layer in layers for weight in layer.weights}
    known |= {id(generator.state) for generator in seed_generators_of(model)}
    paths = [weight.path for weight in changed if id(weight) not in known]
    if not paths or parts == 1 or not is_new(model, "updates"):
        return
    others = f" and {len(paths) - 1} other(s)" if len(paths) > 1 else ""
    warnings.warn(
        f"Received: weight '{paths[0]}'{others}, which a layer assigns when it is called: once for each of {parts} "
        "micro-batches, from the rows of that one, so that training differs from one process. Expected: state that is "
        "updated in a callback or a train_step, or num_microbatches=1.",
        stacklevel=2,
    )


def _where(strategy: tf.distribute.Strategy | None) -> str:
    if strategy is None or type(strategy).__name__.startswith("_Default"):
        return "outside of strategy.scope()"
    return f"in the scope of another {type(strategy).__name__}"


def check_optimizers(model: keras.Model) -> None:
    """Checks a model's optimizers, and those inside of them.

    Raises:
        ValueError: if one was made by Horovod's `DistributedOptimizer`.
    """
    if "horovod" not in sys.modules:
        return  # nothing can be Horovod's; looking through all layers takes its time, at each call of Keras
    for optimizer in all_optimizers_of(model):
        if _is_horovods(optimizer):
            raise ValueError(
                f"Received: optimizer '{optimizer.name}', made by horovod.keras.DistributedOptimizer. With Keras 3 it "
                f"reduces nothing: every rank would train a model of its own. {_EXPECTED}, with the optimizer itself."
            )


def check_callbacks(callbacks: Iterable[Any]) -> None:
    """Checks the callbacks of a fit.

    Raises:
        ValueError: if one is Horovod's.
    """
    for callback in callbacks:
        if _is_horovods(callback):
            raise ValueError(
                f"Received: callback {type(callback).__name__} of {type(callback).__module__}, which does not work "
                f"with Keras 3. {_EXPECTED}, without this callback."
            )


def _is_horovods(thing: Any) -> bool:
    # DistributedOptimizer makes a class of the optimizer's own name, with what is in a class of Horovod's.
    return any(kind.__module__.split(".")[0] == "horovod" for kind in type(thing).__mro__)


def known_devices() -> list[str]:
    """Names of all logical devices that can compute; in a cluster that is connected, also those of its other tasks."""
    return [device.name for device in tf.config.list_logical_devices() if device.device_type in ("CPU", "GPU", "TPU")]


def own_devices(kind: str | None = None) -> list[str]:
    """Names of the devices of this task that are of a kind; by default its GPUs, or without any its CPU devices.

    Example:
        >>> own_devices()[0]
        '/device:CPU:0'
    """
    # TensorFlow lists those of this task first.
    known = [tf.DeviceSpec.from_string(name) for name in known_devices()]
    own = [spec for spec in known if (spec.job, spec.task) == (known[0].job, known[0].task)]
    by_kind = {kind: [spec.to_string() for spec in own if spec.device_type == kind] for kind in ("GPU", "CPU", "TPU")}
    return by_kind["GPU"] or by_kind["CPU"] if kind is None else by_kind.get(kind.upper(), [])


def existing_device(device: Any, remedy: str) -> str:
    """The name of a device as TensorFlow lists it.

    Args:
        device: a string such as `"GPU:1"`, or a `tf.config.LogicalDevice`. What it leaves out is that of this task.
        remedy: what to do to have more devices; a sentence.

    Raises:
        ValueError: if there is no such device.

    Example:
        >>> existing_device("cpu:0", ""), existing_device("/job:localhost/replica:0/task:0/device:CPU:0", "")
        ('/device:CPU:0', '/device:CPU:0')
    """
    known = known_devices()
    first = tf.DeviceSpec.from_string(_ALONE).make_merged_spec(tf.DeviceSpec.from_string(known[0]))
    here = first.replace(device_type=None, device_index=None)
    full = {here.make_merged_spec(tf.DeviceSpec.from_string(name)): name for name in known}
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        wanted = tf.DeviceSpec.from_string(device.name if isinstance(device, tf.config.LogicalDevice) else device)
        return full[here.make_merged_spec(wanted)]
    raise ValueError(f"Received: device {device!r}. Expected: one of {', '.join(known)}. {remedy}")


def check_cluster(cluster: Any, resolver: Any = None) -> None:
    """Checks the two arguments that say which cluster is meant.

    Raises:
        ValueError: for something else than a cluster, or both.
    """
    if resolver is not None and not isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
        raise ValueError(
            f"Received: cluster_resolver={resolver!r}. Expected: a tf.distribute.cluster_resolver.ClusterResolver, or "
            "None to find the cluster. A tfdist.ClusterConfig goes to `cluster=`; devices cannot be chosen here."
        )
    if cluster is not None and not isinstance(cluster, ClusterConfig):
        raise ValueError(
            f"Received: cluster={cluster!r}. Expected: a tfdist.ClusterConfig, such as "
            "tfdist.ClusterConfig.from_tf_config({...}), or None to find the cluster."
        )
    if cluster is not None and resolver is not None:
        raise ValueError("Received both cluster and cluster_resolver. Expected at most one; leave one out.")
