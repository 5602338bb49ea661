"""`tfdist.PipelineStrategy`: the layers of a model on several devices, trained with micro-batches."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.arguments import check_count, check_seconds
from tfdist.cluster.config import ClusterConfig
from tfdist.compat.upstream import Functional, compute_output_spec, distribute_lib, one_device_strategy
from tfdist.inspection.datasets import batch_size, latest_iterator
from tfdist.layer_graph.chunk import context_values, is_traced
from tfdist.layer_graph.graph import functional_of
from tfdist.memory.modes import applied
from tfdist.memory.policy import MemoryPolicy
from tfdist.steps.keras_step import KerasStep, recognise_step, shadowed
from tfdist.strategies import validation
from tfdist.strategies.data_parallel import row_trial
from tfdist.strategies.data_parallel.dataset import static_rows
from tfdist.strategies.hooks import (
    StrategyHooks,
    install,
    jit_compiles_by_itself,
    not_compiled_as_a_whole,
)
from tfdist.strategies.pipeline.placement import (
    LocalScalars,
    local_optimizers,
    move,
    move_slots,
    near_inputs,
    pipeline_devices,
)
from tfdist.strategies.pipeline.plan import PipelineOptions, PipelinePlan, describe
from tfdist.strategies.pipeline.step import (
    MASKED,
    LossHead,
    MaskedOutputs,
    call_model,
    train_step,
    why_not_decomposable,
)
from tfdist.strategies.pipeline.subclassed import functional_of_call, takes
from tfdist.strategies.validation import expect_use

# About so many operations of TensorFlow make a layer.
_OPERATIONS = 10


class _PipelineExtended(one_device_strategy.OneDeviceExtended):
    """The part of `PipelineStrategy` that `tf.distribute` calls."""

    def __init__(self, container: Any, device: str):
        super().__init__(container, device)
        # For each optimizer's slot the variable that it was created for, from `colocate_with`. Ids, not the variables:
        # moving replaces the variable that a slot was created for.
        self.slot_owners: dict[str, str] = {}
        self.scalars: LocalScalars | None = None

    def _create_variable(self, next_creator: Callable, **kwargs: Any) -> Any:
        # The stage of a layer is known once the whole model is built. Until then its variables are in main memory.
        reference = kwargs.pop("colocate_with", None)
        placed = isinstance(reference, tf.Variable)
        with tf.device(reference.device if placed else self._host):
            variable = next_creator(**kwargs)
        if placed:
            self.slot_owners[variable._unique_id] = reference._unique_id
        return variable

    @property
    def _host(self) -> str:
        device = tf.DeviceSpec.from_string(self._device)
        return device.replace(device_type="CPU", device_index=0).to_string()

    def _update(self, var: Any, fn: Callable, args: tuple, kwargs: dict, group: bool) -> Any:
        # Called by an optimizer for each variable: the update runs on the device of the variable and its slots.
        with contextlib.ExitStack() as stack:
            stack.enter_context(tf.device(var.device))
            stack.enter_context(distribute_lib.UpdateContext(var.device))
            if self.scalars is not None:
                stack.enter_context(self.scalars.on(var.device))
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)

    def _validate_colocate_with_variable(self, colocate_with_variable: Any) -> None:
        pass

    def _experimental_distribute_dataset(self, dataset: tf.data.Dataset, options: Any) -> tf.data.Dataset:
        return dataset


class PipelineStrategy(tf.distribute.Strategy):
    """Trains a model that is cut into stages, one a device, with several micro-batches on their way at a time.

    Build and compile a Keras model in `strategy.scope()`: a Sequential or functional one, or a subclass whose `call`
    does nothing but call layers. `fit`, `evaluate` and `predict` then run it on all devices, each of which holds the
    weights and the optimizer's slots of its own layers only. The gradient is that of the whole batch.
    BatchNormalization and Dropout see one micro-batch at a time, as they do in
    GPipe (arXiv 1811.06965). One process drives: the other workers of a cluster serve, and their scripts go no further
    than this constructor.

    Args:
        devices: a device string, or a `tf.config.LogicalDevice`, for each stage, or a list of such lists for several
            pipelines side by side. By default the workers of the discovered cluster, one stage each; without one, all
            GPUs of this process, or all its logical CPU devices.
        num_microbatches: into how many parts each pipeline cuts its rows of a batch; if there are fewer rows, into one
            for each row.
        schedule: "gpipe", "1f1b" (PipeDream-flush: keeps fewer micro-batches in memory), "eager-1f1b" (keeps up to
            twice as many as that, and hides the time that transfers take), "interleaved" (several chunks of the model
            on a device, a smaller bubble), "zb-h1" (Zero Bubble: computes the gradients of weights when a stage would
            be idle), or "auto": 1F1B where the compiled loss is a mean over rows, in the eager form between processes;
            GPipe where it may not be one.
        chunks_per_device: of the interleaved schedule; 2 by default.
        cuts: names of the layers after which the model is cut; by default it is balanced. `tfdist.stage(i)` around
            layer calls is another way to say it.
        balance: what is made even over the stages: "flops", "memory" (weights and activations) or "time" (measured).
        weight_gradients: "accumulate" adds up the micro-batches' gradients; "batched" keeps their factors and makes one
            larger product of them at the end of the step: faster where weights are large against the rows of a
            micro-batch, more memory.
        memory: what stages keep of a micro-batch for its backward pass: a mode of `tfdist.memory.MemoryPolicy`, or a
            policy with one mode, or with modes by the names "stage_0", "stage_1", ... (in the interleaved schedule of
            chunks, in the model's order). By default a stage recomputes where the activations would take half of its
            device's memory; "none" keeps everything.
        replicas: how many pipelines the devices are dealt out to; their gradients are added up.
        cluster: the cluster and this process' place in it; by default what `tfdist.discover()` finds.
        start_timeout: how long to wait at the start until all processes are there, in seconds.

    Raises:
        ValueError: for arguments that make no sense, or devices that do not exist.
        tfdist.ClusterError: if a process of the cluster does not come; the message names it.

    Example (two stages on the CPU):
        >>> import keras, numpy as np, tfdist
        >>> strategy = tfdist.PipelineStrategy(["CPU:0", "CPU:0"], num_microbatches=4)
        >>> with strategy.scope():
        ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), verbose=0)
        >>> len(strategy.summary().splitlines()) > 4
        True
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        *,
        num_microbatches: int = 8,
        schedule: str = "auto",
        chunks_per_device: int | None = None,
        cuts: Sequence[str] | None = None,
        balance: str = "flops",
        weight_gradients: str = "accumulate",
        memory: MemoryPolicy | str | None = None,
        replicas: int | None = None,
        cluster: ClusterConfig | None = None,
        start_timeout: float = 300.0,
    ):
        install()
        if replicas is not None:
            check_count("replicas", replicas)
        check_seconds(start_timeout=start_timeout)
        self._devices = pipeline_devices(devices, replicas, cluster, start_timeout)
        self._options = PipelineOptions(
            self._devices, num_microbatches, schedule, chunks_per_device, cuts, balance, weight_gradients, memory
        )
        self._running = False
        self._rows: int | None = None
        self._latest: Callable[[], keras.Model | None] = lambda: None
        super().__init__(_PipelineExtended(self, self._devices[0][0]))
        self._keras_hooks = PipelineHooks(self)
        expect_use(self)

    _alone = "It runs on one device"

    @property
    def _is_used(self) -> bool:
        return self._latest() is not None

    # The other processes of a cluster go no further than the constructor.
    is_chief = True

    @property
    def devices(self) -> list[list[str]]:
        """For each pipeline, the device of each stage."""
        return [list(row) for row in self._devices]

    def summary(self, model: keras.Model | None = None, width: int = 100) -> str:
        """The stages, the schedule and what to expect of them, as text.

        Args:
            model: a built model, created in this strategy's scope; by default the one that was trained last.
            width: of the text, in characters.

        Raises:
            ValueError: if there is no model to tell about, or it cannot be cut.
        """
        model = self._latest() if model is None else model
        if model is None:
            raise ValueError(
                "Received: no model, and none that was created in this strategy's scope has been trained. Expected: "
                "strategy.summary(model) with a built model, or fit, evaluate or predict before, of a model that was "
                "created in `with strategy.scope(): ...`."
            )
        return describe(self._prepare(model), self._rows, width)

    # Keras' train function ──> run(model.train_step)
    #     the loss decomposes ──> train_step: a micro-batch has its own loss, in any schedule
    #     otherwise           ──> Keras' or the user's step ──> model(x) ──> _PipelinedCall ──> call_model: GPipe
    # Keras' test and predict functions ──> run(...) ──> model(x) ──> _PipelinedCall ──> call_model: forwards only
    def run(self, fn: Callable, args: tuple = (), kwargs: dict | None = None, options: Any = None) -> Any:
        step = recognise_step(fn, args, kwargs)
        if step is None or tf.executing_eagerly():
            return super().run(fn, args, kwargs, options)
        model = step.model
        x = _inputs_of(*args)
        if not model.built:
            # By its first `predict`. Others are built before their step is traced; what cannot be is refused below.
            errors = () if isinstance(model, keras.Sequential) else (Exception,)
            with contextlib.suppress(*errors), tf.init_scope(), self.scope():
                compute_output_spec(model, tree.map_structure(_symbolic, x))
        plan = self._prepare(model, x)
        self._try_rows(step, plan, *args)
        # Keras traces a step. Since the last trace, layers may have been frozen or changed, or the loss replaced.
        plan.refresh()
        self._place(plan)
        for variable in model.variables:
            self._keep(variable)
        if step.kind == "train":
            self._learn_rows(plan, x)
        # Where the loss does not decompose, Keras' own step runs, and its call of the model is pipelined.
        if step.kind == "train" and plan.decomposes:
            fn = self._train_step(plan, fn)
        with shadowed(self, _running=True), near_inputs(), local_optimizers(plan.model, self.extended):
            return super().run(fn, args, kwargs, options)

    def _prepare(self, model: keras.Model, x: Any = None) -> PipelinePlan:
        """Cuts a model into stages and moves its variables there, at the first call.

        Args:
            model: the model.
            x: its inputs, if known: those of a model with its own `call` tell which layers that calls.

        Raises:
            ValueError: if the model has no graph of layers, or cannot be cut where the user wants.
        """
        functional = functional_of(model)
        owner = model if functional is None else functional
        call = vars(owner).get("call")
        if functional is None and (call is None or isinstance(call, _PipelinedCall)):
            functional = known = None if call is None else call.plan.functional
            if x is not None:
                # Not what is known: `call` may ask for attributes that have changed since.
                functional = functional_of_call(model, x, known)
        if functional is None:
            raise ValueError(
                f"Received: model '{model.name}' of class {type(model).__name__}, which has a call method of its own "
                "or no known input shape, so that its layers are not known. Expected: a Sequential model with "
                "an Input, or a functional one, `keras.Model(inputs, outputs)`; a subclass may build its layers so in "
                "__init__ and pass them to `super().__init__(inputs, outputs)`, or have a call that does nothing but "
                "call layers and keras.ops, the same ones in training and inference."
            )
        if (
            not isinstance(call, _PipelinedCall)
            or call.strategy() is not self
            or call.plan.functional is not functional
        ):
            _check_inputs(functional)
            plan = PipelinePlan(self._options, model, functional)
            self._place(plan)
            call = _PipelinedCall(owner, self, plan)
            # Past Keras' attribute tracking.
            object.__setattr__(owner, "call", call)
        self._latest = weakref.ref(model)
        plan = call.plan
        if plan.model.compiled:
            plan.choose_schedule(why_not_decomposable(plan.model, plan.functional))
        return plan

    def _try_rows(self, step: KerasStep, plan: PipelinePlan, data: Any) -> None:
        """Warns, once, of layers that look at several rows: each micro-batch has its own."""
        model = step.model
        if plan.replicas * self._options.num_microbatches == 1 or self._running:
            return

        def call(data: Any) -> Any:
            return model(_inputs_of(data), training=step.kind == "train")

        def said(message: str) -> str:
            received = message.replace(f"{type(model).__name__}.predict_step", f"an output of model '{model.name}'")
            return (
                f"{received.partition(' Expected: ')[0].replace('replica', 'micro-batch')} Expected: what looks at "
                "each row by itself; or PipelineStrategy(num_microbatches=1) with one pipeline."
            )

        # Losses do not matter: those that mix rows get the whole batch. So this tries a call of the model alone.
        trial = KerasStep("predict", model, call)
        trial.note_batch(data)
        with shadowed(model, predict_step=call):
            row_trial.try_once(trial, _OPERATIONS * len(plan.graph.calls), said)

    def _learn_rows(self, plan: PipelinePlan, x: Any) -> None:
        """Takes the size of the training batches from a batch, or from Keras' iterator, where one knows it."""
        rows = static_rows(x)
        rows = batch_size(latest_iterator(plan.model)) if rows is None else rows
        plan.choose_microbatches(rows)
        if rows is not None:
            self._rows = rows
            plan.choose_recompute(rows)

    def _train_step(self, plan: PipelinePlan, stock: Callable) -> Callable:
        head = LossHead(plan)

        @tf.autograph.experimental.do_not_convert
        def run(data: Any) -> Any:
            try:
                return train_step(plan, head, data)
            except MaskedOutputs:
                # Found while the first micro-batch was traced; what it has added to the graph stays unused.
                plan.choose_schedule(MASKED)
                self._learn_rows(plan, _inputs_of(data))
            return stock(data)

        return run

    def _place(self, plan: PipelinePlan) -> None:
        # A layer of several models stays where the first of them has it: functions are traced with its variables.
        new = [item for item in plan.variables if getattr(item[0], "_tfdist_strategy", lambda: None)() is not self]
        moved = {variable._value._unique_id: variable for variable, _ in new}
        for variable, device in new:
            move(variable, device)
            self._keep(variable)
        move_slots(plan.model, self.extended.slot_owners, moved)

    def _keep(self, variable: keras.Variable) -> None:
        """Notes that a variable stays where it is: a function is traced with it.

        A step may read others than those of the stages, such as those of a model that is an attribute of the model.
        """
        # Past Keras' attribute tracking.
        object.__setattr__(variable, "_tfdist_strategy", weakref.ref(self))


class PipelineHooks(StrategyHooks):
    """Models of a `PipelineStrategy`: XLA compiles what is between the transfers."""

    runs_whole_steps = False

    def check(self, model: keras.Model) -> None:
        strategy = self._strategy
        replicas = len(strategy.devices)
        if model.run_eagerly:
            warnings.warn(
                "Received: run_eagerly=True under PipelineStrategy. The layers run one after the other, each on its "
                "variables' device, with the whole batch at once. Expected: run_eagerly=False for a pipeline.",
                stacklevel=2,
            )
        if applied(model) is not None:
            raise ValueError(
                "Received: a memory policy for a model under PipelineStrategy, whose stages keep what they keep for "
                "each micro-batch. Expected: `tfdist.memory.remove(model)`, and PipelineStrategy(memory=...) with a "
                "mode."
            )
        validation.check_compiled(strategy, model)
        if replicas * strategy._options.num_microbatches > 1:
            validation.check_stateful(model)
            validation.warn_of_statistics(model, "the rows of one micro-batch")
        for layer in model._flatten_layers():
            if getattr(layer, "synchronized", False) and replicas > 1:
                raise ValueError(
                    f"Received: layer '{layer.name}' with synchronized=True and replicas={replicas}. A pipeline uses "
                    "the statistics of each micro-batch. Expected: synchronized=False, or LayerNormalization."
                )
        validation.check_float8(model.trainable_variables)
        if functional_of(model) is not None:
            strategy._prepare(model)

    def decide_jit_compile(self, decide: Callable, model: Any) -> bool:
        return jit_compiles_by_itself(model)

    def make_function(self, make: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
        with not_compiled_as_a_whole(model):
            return make(model, *args, **kwargs)

    make_predict_function = make_function


class _PipelinedCall:
    """Stands in for a model's `call`: runs the pipeline while the strategy runs a step of Keras.

    It holds the plan, so that the plan lives as long as the model.
    """

    def __init__(self, owner: keras.Model, strategy: PipelineStrategy, plan: PipelinePlan):
        self.plan, self.strategy = plan, weakref.ref(strategy)
        self._is_functional = owner is plan.functional
        self._original = type(owner).call.__get__(owner)

    def __call__(self, inputs: Any, *args: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        strategy = self.strategy()
        is_running = strategy is not None and strategy._running and not is_traced()
        is_plain = mask is None and not args and not kwargs
        known = training
        if not self._is_functional:
            # A `call` without this argument leaves it to the layers to know.
            known = context_values().get("training") if training is None else training
            is_plain = is_plain and takes(self.plan.functional, inputs)
        if not is_running or not is_plain:
            given = {"training": training, "mask": mask}
            return self._original(inputs, *args, **{k: v for k, v in given.items() if v is not None}, **kwargs)
        return call_model(self.plan, inputs, None if known is None else bool(known))


def _inputs_of(data: Any) -> Any:
    """The inputs of a batch of Keras, or what a step of the user's own gets."""
    return data[0] if isinstance(data, tuple) and data else data


def _symbolic(tensor: tf.Tensor) -> keras.KerasTensor:
    return keras.KerasTensor(tensor.shape, keras.backend.standardize_dtype(tensor.dtype))


def _check_inputs(functional: Functional) -> None:
    for tensor in functional.inputs:
        if getattr(tensor, "sparse", False) or getattr(tensor, "ragged", False):
            raise ValueError(
                f"Received: input '{tensor.name}' of sparse or ragged tensors, which are not cut into micro-batches. "
                "Expected: dense inputs; use `dataset.map` with tf.sparse.to_dense or `.to_tensor()`."
            )
