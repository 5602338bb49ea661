"""All that is changed in Keras: for each function of Keras or TensorFlow, the hook that is called in its place.

    Keras' trainer, losses, metrics, ...  ->  patch  ->  hooks_of(strategy)  ->  the strategy's own answer

A tfdist strategy carries an object of a subclass of `StrategyHooks` (strategies/hooks.py) in its attribute
`_keras_hooks`. A hook is given the function and its arguments, so that it can do what Keras does, and more. What is
called in a step is the same under all strategies: steps/in_step.py.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.compat.patch import Patch, inherited
from tfdist.compat.upstream import global_state, in_stateless_scope


class StrategyTraits:
    """What tfdist itself asks of a strategy; what Keras asks is in `StrategyHooks`, which every strategy subclasses.

    Models without a tfdist strategy have the answers that are here.
    """

    is_data_parallel = False
    """Whether replicas share the rows of each batch."""

    runs_whole_steps = True
    """Whether a training step runs in this process, in one piece."""

    streams_weights = False
    """Whether the device sees the weights of one block at a time; the host or other replicas have them."""

    keeps_parts = False
    """Whether each process has a part of each weight, which it writes into backups itself."""

    keeps_own = False
    """Whether each process trains weights of its own for some steps; backups have those of all."""

    memory: Any = None
    """The policy that models get when they are built, a `tfdist.memory.policy.MemoryPolicy`, or `None`."""

    compressor: Any = None
    """What of its gradients a strategy has not sent yet, a `tfdist.compression.compressor.Compressor`, or `None`."""

    peers: Any = None
    """The processes of the job, a `tfdist.runtime.peers.Peers`; `None` in a single one."""

    agreement: Any = None
    """What all processes do after the same step, a `tfdist.runtime.agreement.Agreement`; `None` in a single one."""

    shares: Any = None
    """Which part of each batch each worker gets, a list, where that may change; else `None`."""

    largest_piece: Any = None
    """The largest part of a batch that a replica may get; `None`: all get equal parts."""

    replicas_before = 0
    """How many replicas other workers have, before this one's, where TensorFlow does not connect them."""

    input_meter: Any = None
    """Counts what compiled steps take from the data, a `tfdist.runtime.progress.InputMeter`, or `None`."""

    seed_is_given = True
    """Whether the program has set a global seed; else the processes have agreed on one."""

    def settle(self, model: Any) -> None:
        """Waits until all steps of a model that were handed out are done: what is read of it then belongs together.

        Raises:
            Exception: what a step has raised.
        """

    def note_update(self, variables: Any) -> None:
        """Called where an optimizer updates variables, also in a step."""

    def more_state(self, model: Any) -> list[keras.Variable]:
        """Variables of the training of a model that neither it nor its optimizers have."""
        return []

    def restored(self, model: Any, of_others: bool) -> None:
        """Called where `keeps_own`, after a model was restored; the backup may be of another number of processes."""

    def steps_alone(self, model: Any) -> int | None:
        """How many steps a worker has taken by itself since the last exchange; `None` where it exchanges in each."""
        return None

    def take_shares(self, shares: list[float]) -> None:
        """Takes over `shares` of an earlier process."""

    def file_of_cache(self, path: str) -> str:
        """Where this process keeps what `Dataset.cache(path)` writes."""
        return path


_without_strategy = StrategyTraits()
_in_step: Any = None


def use(without_strategy: StrategyTraits, in_step: Any) -> None:
    """Lets models without a tfdist strategy ask these hooks, and what stands in a step those functions."""
    global _without_strategy, _in_step
    _without_strategy, _in_step = without_strategy, in_step


def hooks_of(strategy: Any) -> StrategyTraits:
    """The hooks of a strategy; those of models without one, if it is not tfdist's."""
    return strategy._keras_hooks if has_hooks(strategy) else _without_strategy


def has_hooks(strategy: Any) -> bool:
    """Whether a strategy is one of tfdist's."""
    return isinstance(getattr(strategy, "_keras_hooks", None), StrategyTraits)


def asking(hook: str, whom: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """What a `Patch` makes of a function: a call of a hook, which is given the function and its arguments.

    Args:
        hook: the name of the method.
        whom: returns the object that has the hook, given the function's arguments.
    """

    def make(original: Callable) -> Callable:
        @functools.wraps(original)
        def ask(*args: Any, **kwargs: Any) -> Any:
            return getattr(whom(*args, **kwargs), hook)(original, *args, **kwargs)

        return ask

    return make


def _hooks_here(*_: Any, **__: Any) -> Any:
    """Those of the strategy whose step is traced, or in whose scope the program is."""
    return hooks_of(tf.distribute.get_strategy())


def _hooks_of_model(model: Any, *_: Any, **__: Any) -> Any:
    return hooks_of(getattr(model, "_distribute_strategy", None))


def _hooks_of_callbacks(callback_list: Any, model: Any) -> Any:
    return _hooks_of_model(model)


def _hooks_of_input(iterator: Any, distribute_strategy: Any = None, **_: Any) -> Any:
    return hooks_of(distribute_strategy)


def _hooks_of_archive(archive: Any, *_: Any, **__: Any) -> Any:
    """Those of the models which an archive tracks, or whose variables its functions use."""
    used = archive.variables or itertools.chain(*archive._get_variables_used_by_endpoints())
    values = (one.value if isinstance(one, keras.Variable) else one for one in used)
    found = (getattr(value, "_distribute_strategy", None) for value in values)
    return hooks_of(next(filter(None, found), None))


def _hooks_of_outputs(values: Any, strategy: Any) -> Any:
    return hooks_of(strategy)


def _asking(whom: Callable[..., Any], *rows: tuple[str, str, str]) -> list[Patch]:
    """Patches that ask one strategy: the hook, the function, and the upstream issue or why there is none."""
    return [Patch(target, asking(hook, whom), "keras", upstream) for hook, target, upstream in rows]


_TRAINER = "keras.src.backend.tensorflow.trainer"
_LOSSES = "keras.src.losses.loss"
_UNEVEN = "keras issue 19246, uneven batches"
_FILES = "tensorflow issue 38635: all workers write one file"
_BEFORE = "no upstream issue: gradients are clipped and tested for overflow before they are reduced"
_SEEDS = "no upstream issue: all replicas draw the same numbers"

# The trainer: input, building, functions of steps, what a user calls.
_TRAINING = [
    *_asking(
        _hooks_of_input,
        (
            "make_epoch_iterator",
            f"{_TRAINER}:TFEpochIterator.__init__",
            "no upstream hook tells a strategy that Keras asks for a dataset",
        ),
    ),
    *_asking(
        _hooks_of_model,
        ("build", inherited(keras.Model, "_maybe_symbolic_build"), "keras issue 20585"),
        (
            "make_predict_function",
            inherited(keras.Model, "make_predict_function"),
            "no upstream hook tells a strategy which model predicts",
        ),
        (
            "make_function",
            inherited(keras.Model, "_make_function"),
            "Keras compiles the whole step with XLA, which has no collectives",
        ),
        (
            "decide_jit_compile",
            inherited(keras.Model, "_resolve_auto_jit_compile"),
            "jit_compile='auto' means False under every strategy",
        ),
        (
            "read_metrics",
            inherited(keras.Model, "_get_metrics_result_or_logs"),
            "no upstream hook tells a strategy that an epoch has ended",
        ),
        ("fit", inherited(keras.Model, "fit"), "no upstream hook: fit cannot be told to go on"),
        *(
            ("call", inherited(keras.Model, method), "no upstream hook tells a strategy which thread uses a model")
            for method in ("evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
        ),
    ),
    *_asking(
        _hooks_here,
        (
            "initialize_variable",
            inherited(keras.Variable, "_initialize"),
            "no upstream issue: assign_add is a read and a write, and sparse_read does not exist",
        ),
    ),
    *_asking(
        _hooks_of_outputs,
        (
            "concatenate",
            f"{_TRAINER}:_multi_worker_concat",
            "no upstream issue: rows of sparse tensors, and outputs without rows",
        ),
    ),
    *_asking(_hooks_of_callbacks, ("set_model", "keras.src.callbacks.callback_list:CallbackList.set_model", _FILES)),
]

_SAVING = _asking(
    _hooks_of_model,
    ("save", "keras.src.saving.saving_lib:save_model", _FILES),
    ("save", "keras.src.saving.saving_lib:save_weights_only", _FILES),
    ("save", "keras.src.legacy.saving.legacy_h5_format:save_model_to_hdf5", _FILES),
    ("save", "keras.src.models.model:Model.export", _FILES),
    *(
        ("save_or_ask", inherited(keras.Model, method), "no upstream issue: all workers ask before they overwrite")
        for method in ("save", "save_weights")
    ),
    (
        "fits_into_memory",
        "keras.src.saving.saving_lib:is_memory_sufficient",
        "no upstream issue: Keras compares the whole model with the memory that is free, and may take twice as much",
    ),
)
_SAVING += _asking(_hooks_of_archive, ("save", inherited(type(keras.export.ExportArchive()), "write_out"), _FILES))

# What stands in a step, which knows the shares of a batch.
_IN_STEP = [
    Patch(target, asking(hook, lambda *_, **__: _in_step), package, upstream)
    for package, hook, target, upstream in (
        ("keras", "scale_loss", f"{_LOSSES}:scale_loss_for_distribution", _UNEVEN),
        ("keras", "scale_loss", f"{_LOSSES}:unscale_loss_for_distribution", _UNEVEN),
        ("keras", "apply_mask", f"{_LOSSES}:apply_mask", _UNEVEN),
        ("keras", "reduce_values", f"{_LOSSES}:reduce_values", _UNEVEN),
        ("keras", "update_mean", "keras.src.metrics.reduction_metrics:Mean.update_state", _UNEVEN),
        ("keras", "update_mean", "keras.src.metrics.reduction_metrics:Sum.update_state", _UNEVEN),
        (
            "keras",
            "sum_gradients",
            "keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",
            _BEFORE,
        ),
        ("keras", "apply_gradients", "keras.src.optimizers.base_optimizer:BaseOptimizer.apply", _BEFORE),
        ("keras", "apply_gradients", "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply", _BEFORE),
        ("keras", "next_seed", "keras.src.random.seed_generator:SeedGenerator.next", _SEEDS),
        ("keras", "draw_seed", "keras.src.backend.tensorflow.random:draw_seed", _SEEDS),
        (
            "tensorflow",
            "pad",
            "tensorflow.python.ops.ragged.ragged_tensor:RaggedTensor.to_tensor",
            "no upstream issue: replicas pad to their own longest row",
        ),
        (
            "tensorflow",
            "cond",
            "tensorflow.python.ops.cond_v2:cond_v2",
            "no upstream issue: replicas take different branches, and cannot meet in one",
        ),
    )
]


# A strategy's variables: as numbers, and where their graph is replaced.
def _numpy_as(kind: Callable[[Any], Any]) -> Callable[[None], Callable]:
    return lambda original: lambda self: kind(self.numpy())


def _array(original: None) -> Callable:
    def __array__(self: Any, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        # What is read is a copy already.
        return np.asarray(self.numpy(), dtype)

    return __array__


def _reset(original: Callable) -> Callable:
    def reset_default_graph() -> None:
        # A scope is on the stack of the default graph, which has no nodes: all run eagerly, or in functions.
        if not (tf.executing_eagerly() and has_hooks(tf.distribute.get_strategy())):
            original()

    return reset_default_graph


_VARIABLES = [
    Patch(
        "tensorflow.compat.v1:reset_default_graph",
        _reset,
        "tensorflow",
        "no upstream issue: keras.utils.clear_session replaces the graph that knows of the scope around it",
    ),
    *(
        Patch(
            f"tensorflow.python.distribute.values:DistributedVariable.__{name}__",
            make,
            "tensorflow",
            "no upstream issue: tf.Variable converts to int, float and numpy, a strategy's variables do not",
            is_new=True,
        )
        for name, make in (
            *((kind.__name__, _numpy_as(kind)) for kind in (int, float, complex)),
            ("array", _array),
        )
    ),
]


# An optimizer, or what stands in for it with whole tables in place of shards.
_saved_form: Callable[[Any], Any] | None = None


def _on_saved_form(original: Callable) -> Callable:
    @functools.wraps(original)
    def method(self: Any, store: Any) -> None:
        original(self if _saved_form is None else _saved_form(self), store)

    return method


_SLOTS = [
    Patch(
        f"keras.src.optimizers.base_optimizer:BaseOptimizer.{method}",
        _on_saved_form,
        "keras",
        "no upstream issue: optimizers are saved as a list that depends on how weights are split",
    )
    for method in ("save_own_variables", "load_own_variables")
]


def save_as(saved_form: Callable[[Any], Any]) -> None:
    """Installs the patches of saved optimizers alone: a sharded table may be in a program without a strategy.

    Args:
        saved_form: takes an optimizer, and returns it, or an object with its name and with other `variables`.
    """
    global _saved_form
    _saved_form = saved_form
    for patch in _SLOTS:
        patch.install()


def _recompute(original: Callable) -> Callable:
    """`tf.recompute_grad`, which `keras.remat` and `keras.RematScope` call."""

    @functools.wraps(original)
    def recompute_grad(function: Callable) -> Callable:
        recomputed = original(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # In a block or a stage, where tfdist decides what is kept.
            if in_stateless_scope():
                return function(*args, **kwargs)
            _warn_of_race()
            return recomputed(*args, **kwargs)

        return call

    return recompute_grad


def _warn_of_race() -> None:
    """Warns once of what TensorFlow computes again in a training step, which tfdist could do."""
    step, strategy = _in_step.current_step(), tf.distribute.get_strategy()
    has_order = tf.config.optimizer.get_experimental_options().get("dependency_optimization") is False
    if step is None or step.kind != "train" or step.graph is None or has_order or not is_new(strategy, "race"):
        return
    warnings.warn(
        "Received: keras.remat or tf.recompute_grad in a training step. In a graph, TensorFlow's optimizer of "
        "dependencies loses the order of what is computed again and of updates: gradients are sometimes those of "
        "weights that are updated already. Expected: memory='recompute' of the strategy in its place; or, at the "
        "beginning of the program, tf.config.optimizer.set_experimental_options({'dependency_optimization': False}).",
        stacklevel=3,
    )


_RECOMPUTED = [
    Patch(
        "tensorflow:recompute_grad",
        _recompute,
        "tensorflow",
        "no upstream issue: it looks for variables, whose values a StatelessScope has; so weights lose their gradients",
    )
]


def with_state_of_caller(function: Callable) -> Callable:
    """A function for another thread, in which Keras would keep other dtype policies, scopes and seeds."""
    of_caller = dict(vars(global_state.GLOBAL_STATE_TRACKER))

    def call(*args: Any, **kwargs: Any) -> Any:
        # Replicas take turns in the middle of scopes: each has stacks of its own. All of them count names together.
        own = {name: list(value) if type(value) is list else value for name, value in of_caller.items()}
        vars(global_state.GLOBAL_STATE_TRACKER).update(own)
        return function(*args, **kwargs)

    return call


def _with_state(original: Callable) -> Callable:
    @functools.wraps(original)
    def call_for_each_replica(distribution: Any, fn: Callable, args: Any, kwargs: Any) -> Any:
        return original(distribution, with_state_of_caller(fn) if has_hooks(distribution) else fn, args, kwargs)

    return call_for_each_replica


_REPLICAS = [
    Patch(
        "tensorflow.python.distribute.mirrored_run:_call_for_each_replica",
        _with_state,
        "tensorflow",
        "no upstream issue: Keras keeps dtype policies, scopes and seeds by thread, and each replica has a thread",
    )
]
PATCHES = [*_IN_STEP, *_TRAINING, *_SAVING, *_VARIABLES, *_SLOTS, *_RECOMPUTED, *_REPLICAS]
