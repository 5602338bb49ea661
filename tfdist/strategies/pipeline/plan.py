"""How a model runs on several devices: where it is cut, which device has which part, in which order they work.

`PipelineOptions` holds the arguments of the strategy, of which a `PipelinePlan` is made for each model. The author of
a model may say where to cut it: by `with tfdist.stage(1):` around layers, or by names of layers. `describe` is the plan
as text.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import fnmatch
import functools
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from numbers import Integral
from typing import Any

import keras
import tensorflow as tf
from keras import tree
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from tfdist.arguments import check_count, is_new
from tfdist.compat.upstream import Functional, Node, device_lib, record, unpack_singleton
from tfdist.layer_graph.chunk import Chunk, Value, is_differentiable, make_chunks, own_metrics, uncuttable
from tfdist.layer_graph.costs import costs_of, crossing, measured_costs, weights
from tfdist.layer_graph.graph import Call, LayerGraph, flatten
from tfdist.layer_graph.partition import Cost, balance
from tfdist.memory.policy import MODES, MemoryPolicy, policy_of
from tfdist.plain_text import plain_text
from tfdist.strategies.pipeline.chunk import Passes
from tfdist.strategies.pipeline.schedule import Schedule, forward_only, make_schedule, simulate, speed_up

_log = logging.getLogger("tfdist")

SCHEDULES = ("auto", "gpipe", "1f1b", "eager-1f1b", "interleaved", "zb-h1")
BALANCES = ("flops", "memory", "time")
WEIGHT_GRADIENTS = ("accumulate", "batched")

# The rows of a batch for which costs are estimated. Only the ratios of costs count; they hardly depend on it.
_ROWS = 16
# The cost of sending a byte to another stage, in operations that a core could do in that time (some tens of GFLOP/s,
# against a few GB/s). It decides only between cuts that balance the work equally well.
_FLOPS_PER_BYTE = 20.0


class PipelineOptions:
    """The arguments of `PipelineStrategy` that say how models are cut and run, for all its models.

    Raises:
        ValueError: for a wrong argument.
    """

    def __init__(
        self,
        pipelines: Sequence[Sequence[str]],
        num_microbatches: int,
        schedule: str,
        chunks_per_device: int | None,
        cuts: Sequence[str] | None,
        balance: str,
        weight_gradients: str,
        memory: MemoryPolicy | str | None,
    ):
        _check_choice("schedule", schedule, SCHEDULES)
        _check_choice("balance", balance, BALANCES)
        _check_choice("weight_gradients", weight_gradients, WEIGHT_GRADIENTS)
        check_count("num_microbatches", num_microbatches)
        if chunks_per_device is None:
            chunks_per_device = 2 if schedule == "interleaved" else 1
        check_count("chunks_per_device", chunks_per_device)
        if chunks_per_device > 1 and schedule != "interleaved":
            raise ValueError(
                f"Received: chunks_per_device={chunks_per_device} with schedule={schedule!r}. Expected: "
                "schedule='interleaved', the only one that gives a device several chunks of the model."
            )
        if schedule == "zb-h1" and weight_gradients == "batched":
            raise ValueError(
                "Received: weight_gradients='batched' with schedule='zb-h1', which computes gradients of weights while "
                "a stage would wait, not at the end. Expected: weight_gradients='accumulate', or another schedule."
            )
        self.pipelines, self.num_microbatches, self.schedule = pipelines, num_microbatches, schedule
        self.devices = pipelines[0]
        self.chunks_per_device, self.cuts, self.balance = chunks_per_device, cuts, balance
        self.chunks = len(self.devices) * chunks_per_device
        self.split_weights = weight_gradients == "batched"
        self.policy = None if memory is None else _policy_for_stages(memory, _stage_names(self.chunks))

    def fitting(self, model: keras.Model, graph: LayerGraph) -> PipelineOptions:
        """These options, or, with a warning, with fewer stages: for a model that has fewer layers than stages."""
        pieces = len(set(range(1, len(graph.calls))) - uncuttable(graph)) + 1
        if pieces >= self.chunks or self.cuts is not None or stages_of(graph) is not None:
            return self
        fitting = copy.copy(self)
        stages = min(pieces, len(self.devices))
        fitting.chunks_per_device = pieces // stages if self.chunks_per_device > 1 else 1
        fitting.pipelines = [row[:stages] for row in self.pipelines]
        fitting.devices, fitting.chunks = fitting.pipelines[0], stages * fitting.chunks_per_device
        if is_new(model, "stages"):
            warnings.warn(
                f"Received: model '{model.name}', which can be cut into {pieces} piece(s) at most, for {self.chunks} "
                f"stages. It runs on {fitting.chunks} stage(s); the other devices are idle. Expected: at least as many "
                "layers as stages, or fewer devices.",
                stacklevel=2,
            )
        return fitting

    def make_schedule(self, name: str, microbatches: int | None = None) -> Schedule:
        """The order of the work in a training step; of "auto", as long as nothing is known of the loss, GPipe."""
        name = "gpipe" if name == "auto" else name
        return make_schedule(name, len(self.devices), microbatches or self.num_microbatches, self.chunks_per_device)

    @property
    def best_schedule(self) -> str:
        """The best schedule for a loss that decomposes: between processes, transfers take time, which can be hidden."""
        specs = map(tf.DeviceSpec.from_string, self.devices)
        return "eager-1f1b" if len({(spec.job, spec.task) for spec in specs}) > 1 else "1f1b"

    def cut(self, graph: LayerGraph) -> tuple[LayerGraph, tuple[int, ...]]:
        """The calls of a model in the order of the stages, and the positions before which it is cut.

        Raises:
            ValueError: if it cannot be cut into as many pieces, or not where the user wants.
        """
        scoped = stages_of(graph)
        if self.cuts is not None and scoped is not None:
            raise ValueError("Received: cuts=... and layers in tfdist.stage() scopes. Expected: one of the two.")
        if scoped is not None:
            graph, positions = scoped
        elif self.cuts is not None:
            positions = cuts_from_names(graph, self.cuts)
        else:
            costs = measured_costs(graph, _ROWS) if self.balance == "time" else costs_of(graph, _ROWS)
            bytes_sent = [_FLOPS_PER_BYTE * _ROWS * sent for sent in crossing(graph)] if self.balance == "flops" else ()
            positions = balance(weights(costs, self.balance), self.chunks, bytes_sent, uncuttable(graph))
        if len(positions) != self.chunks - 1:
            raise ValueError(
                f"Received: {len(positions)} cuts, which make {len(positions) + 1} pieces. Expected: {self.chunks - 1} "
                f"cuts, for {len(self.devices)} devices with {self.chunks_per_device} piece(s) each."
            )
        if parted := sorted(uncuttable(graph) & set(positions)):
            raise ValueError(
                f"Received: a cut before layer '{graph.calls[parted[0]].name}', between two calls of a layer that has "
                "a state (statistics, or seeds). Its calls have to be on one stage. Expected: a cut elsewhere."
            )
        return graph, tuple(positions)


class PipelinePlan:
    """How one model runs on several devices.

    Args:
        options: of the strategy.
        model: the model.
        functional: its graph of layers, as Keras has it.

    Attributes:
        graph: the graph of layers, flat.
        costs: the cost of each call; all nothing if they are not known.
        pipelines: for each pipeline, the device of each stage. All train the same variables.
        devices: the devices of the first pipeline, which has the variables.
        schedule: the order of the work in a training step.
        modes: for each chunk, the memory mode: what it keeps for the backward pass, and where.
        policy: to which host what is swapped goes, and when it comes back.
        decomposes: whether the compiled loss can be computed micro-batch by micro-batch.
        metrics: the variables of metrics that layers have, by their ids.

    Raises:
        ValueError: if it cannot be cut into as many pieces, or not where the user wants.
    """

    def __init__(self, options: PipelineOptions, model: keras.Model, functional: Functional):
        graph = flatten(functional)
        options = options.fitting(model, graph)
        self._options, self.model, self.functional = options, model, functional
        self.graph, self._cuts = options.cut(graph)
        self.costs = _known_costs(self.graph)
        self.pipelines, self.devices = options.pipelines, options.devices
        self.schedule = options.make_schedule(options.schedule)
        self.policy = options.policy or MemoryPolicy("none")
        self.modes = [self.policy.mode_of(name) for name in _stage_names(options.chunks)]
        self.decomposes = False
        # Obstacles of which a warning has been logged.
        self._warned_of: set[str | None] = set()
        self.refresh()

    def refresh(self) -> None:
        """Forgets the traced functions and which variables are trainable: the model may have changed since."""
        self.chunks = make_chunks(self.graph, self._cuts)
        # Of metrics that layers have as attributes, in the first chunk that has the layer.
        self.metrics: dict[int, keras.Variable] = {}
        for index, chunk in enumerate(self.chunks):
            known = {id(variable) for variable in chunk.state} | self.metrics.keys()
            new = [variable for variable in own_metrics(chunk.layers) if id(variable) not in known]
            self.metrics |= {id(variable): variable for variable in new}
            self.chunks[index] = dataclasses.replace(chunk, state=(*chunk.state, *new))
        self._passes: dict[Any, Passes] = {}
        # The chunk on whose device a variable is, by the variable's id: the first chunk that uses it.
        self.homes: dict[int, int] = {}
        for chunk in self.chunks:
            for variable in (*chunk.trainable, *chunk.state):
                self.homes.setdefault(id(variable), chunk.index)

    @property
    def recompute(self) -> list[bool]:
        """For each chunk, whether its backward pass runs the forward pass again."""
        return [mode in ("recompute", "recompute+swap") for mode in self.modes]

    @property
    def swap(self) -> list[bool]:
        """For each chunk, whether what it keeps is on the host until its backward pass."""
        return [mode in ("swap", "recompute+swap") for mode in self.modes]

    def passes(
        self,
        chunk: Chunk,
        training: bool | None,
        inherited: bool | None,
        inputs: Sequence[Value],
        differentiable: bool,
    ) -> Passes:
        """The traced passes of a chunk, for inputs of these shapes and dtypes."""
        specs = tuple(Value(*(None if t is None else tf.TensorSpec(t.shape, t.dtype) for t in v)) for v in inputs)
        apart = self.schedule.splits_backward
        key = chunk.index, training, inherited, specs, differentiable, apart, bool(self.model.jit_compile)
        if key not in self._passes:
            recompute, split = self.recompute[chunk.index], self._options.split_weights
            # Without a device in it, a function runs where it is called: several pipelines call it.
            with tf.device(None):
                self._passes[key] = Passes(
                    chunk, self.model, training, inherited, recompute, split, apart, specs, differentiable
                )
        return self._passes[key]

    def check_captures(self) -> None:
        """Refuses a layer that reads a tensor which it was not passed, if a tape has recorded that."""
        for (index, *_), passes in self._passes.items():
            for tensor in filter(is_differentiable, passes.captures):
                if record.should_record_backprop([tensor]):
                    names = ", ".join(call.name for call in self.chunks[index].calls)
                    raise ValueError(
                        f"Received: a layer that reads a tensor that it was not passed ({tensor.name}), among {names}. "
                        "Its gradient would be lost. Expected: layers that take tensors as arguments of their call."
                    )

    def costs_of_chunk(self, chunk: int) -> Sequence[Cost]:
        """Costs of a chunk's calls."""
        bounds = (0, *self._cuts, len(self.graph.calls))
        return self.costs[bounds[chunk] : bounds[chunk + 1]]

    @property
    def replicas(self) -> int:
        """The number of pipelines."""
        return len(self.pipelines)

    def device_of(self, chunk: int, replica: int = 0) -> str:
        """The device that runs a chunk."""
        return self.pipelines[replica][self.schedule.device_of(chunk)]

    def device_of_value(self, key: int) -> str:
        """The device on which a value is computed; that of the first stage for the model's inputs."""
        return self.device_of(next((chunk.index for chunk in self.chunks if key in chunk.outputs), 0))

    @property
    def variables(self) -> list[tuple[keras.Variable, str]]:
        """All variables of the stages, with the device that each of them is on."""
        found = {id(v): v for chunk in self.chunks for v in (*chunk.trainable, *chunk.state)}
        return [(variable, self.device_of(self.homes[key])) for key, variable in found.items()]

    def pack_outputs(self, tensors: list[Any]) -> Any:
        """The structure that calling the model returns."""
        return unpack_singleton(tree.pack_sequence_as(self.functional._outputs_struct, tensors))

    def choose_schedule(self, obstacle: str | None) -> None:
        """Sets the schedule that the user wants, or the best one that the compiled loss allows.

        Args:
            obstacle: why the loss does not decompose over micro-batches; `None` if it does.
        """
        name = wanted = self._options.schedule
        self.decomposes = obstacle is None
        if not self.decomposes:
            name = "gpipe"
            if wanted not in ("auto", "gpipe") and obstacle not in self._warned_of:
                self._warned_of.add(obstacle)
                _log.warning(
                    "schedule=%r is run as 'gpipe': all micro-batches go forward before the first one goes back, "
                    "because %s. It trains the same, and keeps more activations.",
                    wanted,
                    obstacle,
                )
        elif wanted == "auto":
            name = self._options.best_schedule
        if self.schedule.name != name:
            self.schedule = self._options.make_schedule(name, self.schedule.microbatches)

    def choose_microbatches(self, rows: int | None) -> None:
        """Lets a training step have no more micro-batches than a batch has rows, where that number is known."""
        self.schedule = self._options.make_schedule(self.schedule.name, self._microbatches_for(rows))

    def inference_of(self, rows: int | None) -> Schedule:
        """The order of the work where nothing is trained: with no more micro-batches than there are rows, if known."""
        return forward_only(len(self.devices), self._microbatches_for(rows), self.schedule.chunks_per_device)

    def _microbatches_for(self, rows: int | None) -> int:
        most = self._options.num_microbatches
        return most if rows is None else max(1, min(rows // self.replicas, most))

    def choose_recompute(self, rows: int) -> None:
        """Without a memory policy, lets chunks recompute whose activations would fill over half of the memory.

        These are the outputs of their layers, for all micro-batches in flight of a batch of so many rows.
        """
        if self._options.policy is not None:
            return
        in_flight = max(self.schedule.in_flight())
        rows_in_flight = rows / self.replicas / self.schedule.microbatches * in_flight
        modes = []
        for chunk in self.chunks:
            per_row = sum(cost.output_bytes for cost in self.costs_of_chunk(chunk.index)) / _ROWS
            is_short = per_row * rows_in_flight > _memory_limit(self.device_of(chunk.index), self.devices) / 2
            modes.append("recompute" if is_short else "none")
        if modes != self.modes:
            self.modes, self._passes = modes, {}


def _known_costs(graph: LayerGraph) -> list[Cost]:
    """The cost of each call; nothing for a model that is cut where the user wants, and has sizes that nobody knows."""
    try:
        return costs_of(graph, _ROWS)
    except ValueError:
        return [Cost(0.0, 0.0, 0.0)] * len(graph.calls)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"Received: {name}={value!r}. Expected one of {', '.join(map(repr, choices))}.")


def _stage_names(count: int) -> list[str]:
    """The names of the stages, or of an interleaved schedule's chunks, for a memory policy."""
    return [f"stage_{index}" for index in range(count)]


def _policy_for_stages(memory: MemoryPolicy | str, names: Sequence[str]) -> MemoryPolicy:
    """The policy that is meant, whose blocks are the stages."""
    policy = policy_of(memory)
    patterns = () if isinstance(policy.mode, str) else policy.mode
    unused = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if not set(policy.modes) <= set(MODES) or policy.blocks != "auto" or unused:
        raise ValueError(
            f"Received: memory={memory!r} for a PipelineStrategy, whose blocks are its stages: {', '.join(names)}. "
            "Expected: one mode for all of them, such as 'recompute' or MemoryPolicy('swap', min_bytes=1 << 20), or "
            "modes by their names, such as MemoryPolicy({'stage_0': 'recompute'}), without `blocks`; or None to "
            "recompute where the memory is short."
        )
    return policy


def _memory_limit(device: str, devices: Sequence[str]) -> int:
    """The bytes of memory that a device has for the pipeline.

    A CPU device has its part of this machine's memory. Remote devices are taken to have as much as local ones of their
    kind: there is no way to ask how much they have.

    Args:
        device: the device.
        devices: all devices of the pipeline; those on the same CPU share its memory.
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        same = [s for s in map(tf.DeviceSpec.from_string, devices) if s.device_type == "CPU" and s.task == spec.task]
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(same)
    limits = [d.memory_limit for d in device_lib.list_local_devices() if d.device_type == spec.device_type]
    return min(limits, default=2**63)


# Attribute of a Keras node (one call of a layer): the number of its stage.
_STAGE = "_tfdist_stage"
_current: ContextVar[int | None] = ContextVar("tfdist_stage", default=None)


@contextlib.contextmanager
def stage(index: int) -> Iterator[None]:
    """Puts the layers that are called within into one stage of a pipeline.

    It is for building Functional models: the calls of layers and of `keras.ops` on symbolic tensors count. A call
    outside of any scope belongs to the last stage that one of its inputs comes from. Where scopes are nested, the
    inner one counts; where a model is called in a scope, all its layers are in that stage. A model that was loaded
    from a file or cloned has no stages, nor has one whose inputs are what layers made: Keras copies its calls.

    Args:
        index: number of the stage, from 0.

    Raises:
        ValueError: if `index` is no whole number of at least 0.

    Example:
        >>> import keras
        >>> inputs = keras.Input((4,))
        >>> with stage(0):
        ...     x = keras.layers.Dense(8)(inputs)
        >>> with stage(1):
        ...     outputs = keras.layers.Dense(1)(x)
        >>> model = keras.Model(inputs, outputs)
    """
    if isinstance(index, bool) or not isinstance(index, Integral) or index < 0:
        raise ValueError(f"Received: stage({index!r}). Expected: a whole number of at least 0: the first stage is 0.")
    _let_nodes_note_stages()
    token = _current.set(int(index))
    try:
        yield
    finally:
        _current.reset(token)


def stages_of(graph: LayerGraph) -> tuple[LayerGraph, tuple[int, ...]] | None:
    """The stages that the author of a model has named.

    Returns:
        None if there are none. Otherwise the calls, sorted by stage, and the position of the first call of each stage
        but the first.

    Raises:
        ValueError: if a call takes what a later stage makes, or a stage between others has no calls.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> inputs = keras.Input((4,))
        >>> with stage(0):
        ...     x = keras.layers.Dense(8)(inputs)
        >>> with stage(1):
        ...     x = keras.layers.Dense(1)(x)
        >>> stages_of(flatten(keras.Model(inputs, x)))[1]
        (1,)
    """
    wanted = [_stage_of(call) for call in graph.calls]
    if all(number is None for number in wanted):
        return None
    stages: list[int] = []
    maker: dict[int, tuple[int, str]] = {}
    for call, number in zip(graph.calls, wanted, strict=True):
        latest, source = max((maker[key] for key in call.inputs.values() if key in maker), default=(0, ""))
        own = latest if number is None else number
        if own < latest:
            raise ValueError(
                f"Received: layer '{call.name}' in stage {own}, which takes what '{source}' in stage {latest} makes. "
                "Expected: each layer takes what its own or an earlier stage makes."
            )
        maker.update((key, (own, call.name)) for key in call.outputs)
        stages.append(own)
    used = sorted(set(stages))
    if used != list(range(len(used))):
        raise ValueError(f"Received: layers in the stages {used}. Expected: layers in each stage from 0 to {used[-1]}.")
    order = sorted(range(len(stages)), key=stages.__getitem__)
    sorted_stages = sorted(stages)
    calls = tuple(graph.calls[i] for i in order)
    return dataclasses.replace(graph, calls=calls), tuple(sorted_stages.index(number) for number in used[1:])


def _stage_of(call: Call) -> int | None:
    """The stage of a call; for a call in nested models that of the outermost call that has one."""
    numbers = (getattr(node, _STAGE, None) for node in (*call.enclosing, call.node))
    return next((number for number in numbers if number is not None), None)


@functools.cache
def _let_nodes_note_stages() -> None:
    """From now on, each new node notes the stage in which it is made: Keras has no hook for the call of a layer."""
    plain_init = Node.__init__

    def init_with_stage(node: Node, *args: Any, **kwargs: Any) -> None:
        plain_init(node, *args, **kwargs)
        if (index := _current.get()) is not None:
            setattr(node, _STAGE, index)

    Node.__init__ = init_with_stage


def cuts_from_names(graph: LayerGraph, names: Sequence[str]) -> tuple[int, ...]:
    """The positions at which a model is cut, after named layers.

    Args:
        graph: the calls of the model.
        names: layers after whose last call to cut, in order. A layer in a nested model is named by its path,
            "encoder/dense_1", or by the end of its path if there is no other layer with it; "encoder" is the end of
            the nested model.

    Returns:
        The position of the first call of each stage but the first.

    Raises:
        ValueError: if a name is unknown or ambiguous, the last of all layers, or not behind the name before it.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((2,)), *(keras.layers.Dense(1, name=name) for name in "abc")]
        >>> cuts_from_names(flatten(keras.Sequential(layers)._functional), ["a", "b"])
        (1, 2)
    """
    if isinstance(names, str):
        raise ValueError(f"Received: cuts={names!r}. Expected: a list of names of layers, [{names!r}].")
    ends = _ends(graph)
    cuts = [ends[_path(name, ends)] for name in names]
    for i, (cut, before) in enumerate(zip(cuts, [0, *cuts], strict=False)):
        if cut <= before or cut == len(graph.calls):
            raise ValueError(
                f"Received: {names[i]!r} at position {i} of cuts={list(names)}, which leaves no layer for a stage. "
                "Expected: layers in the order in which they are called, and none after which no layer follows."
            )
    return tuple(cuts)


def _ends(graph: LayerGraph) -> dict[str, int]:
    """For the path of each layer, and of each model that is nested, the position behind its last call."""
    ends = {}
    for position, call in enumerate(graph.calls):
        parts = call.name.split("/")
        for depth in range(1, len(parts) + 1):
            ends["/".join(parts[:depth])] = position + 1
    return ends


def _path(name: str, ends: dict[str, int]) -> str:
    """The path that a name stands for."""
    if name in ends:
        return name
    matches = [path for path in ends if path.endswith(f"/{name}")]
    if len(matches) == 1:
        return matches[0]
    known = [part for path in ends for part in (path, path.rsplit("/", 1)[-1])]
    near = matches or difflib.get_close_matches(str(name), known) or list(ends)[:3]
    raise ValueError(
        f"Received: {name!r} in cuts, which {'several layers have' if matches else 'no layer has'}. Expected: the name "
        f"or path of one layer, such as {', '.join(map(repr, dict.fromkeys(near)))}."
    )


# Cost of a backward pass, in forward passes: it computes two products for each one of the forward pass, one of them for
# weights, and one more if it runs the forward pass again.
_BACKWARD, _WEIGHTS, _RECOMPUTE = 2.0, 1.0, 3.0
_UNITS = ("", "K", "M", "G", "T", "P")


def describe(plan: PipelinePlan, rows: int | None, width: int) -> str:
    """The stages of a plan, and below them the schedule and what to expect.

    Args:
        plan: the plan.
        rows: the rows of a batch; `None` if that is not known.
        width: the width of the text, in characters.
    """
    flops = [sum(cost.flops for cost in plan.costs_of_chunk(chunk.index)) for chunk in plan.chunks]
    return plain_text(_table(plan, flops), *map(Text, _lines(plan, flops, rows)), width=width)


def _table(plan: PipelinePlan, flops: list[float]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_footer=True, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("Stage", justify="right", no_wrap=True)
    table.add_column("Device", no_wrap=True)
    table.add_column("Layers", overflow="fold")
    for name in ("Calls", "Parameters", "Size", "FLOPs"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Sent/row", justify="right")
    totals = [0, 0, 0]
    for chunk, cost in zip(plan.chunks, flops, strict=True):
        names = [call.name for call in chunk.calls]
        own = [v for v in (*chunk.trainable, *chunk.state) if plan.homes[id(v)] == chunk.index]
        parameters = sum(math.prod(v.shape) for v in own)
        size = sum(math.prod(v.shape) * v._value.dtype.size for v in own)
        later = {key for other in plan.chunks[chunk.index + 1 :] for key in other.inputs}
        sent = sum(_bytes_per_row(*plan.graph.shapes[key]) for key in chunk.outputs if key in later)
        totals = [total + more for total, more in zip(totals, (len(names), parameters, size), strict=True)]
        table.add_row(
            str(chunk.index),
            Text(plan.device_of(chunk.index).replace("/replica:0", "")),  # it is the same everywhere
            Text(f"{names[0]} … {names[-1]}" if len(names) > 1 else "".join(names) or "-"),
            str(len(names)),
            f"{parameters:,}",
            _size(size),
            f"{cost / sum(flops):.1%}" if sum(flops) else "-",
            _size(sent) if sent else "-",
        )
    for column, text in zip(table.columns[3:], (str(totals[0]), f"{totals[1]:,}", _size(totals[2])), strict=False):
        column.footer = text
    return table


def _lines(plan: PipelinePlan, flops: list[float], rows: int | None) -> list[str]:
    schedule, replicas = plan.schedule, plan.replicas
    devices, chunks, count = schedule.devices, schedule.chunks_per_device, schedule.microbatches
    backward = [c * (_RECOMPUTE if again else _BACKWARD) for c, again in zip(flops, plan.recompute, strict=True)]
    # The speed-up against one device, which would not recompute: useful work, not all work, counts.
    useful = (1 + _BACKWARD) * sum(flops)
    predicted = "unknown"
    if useful:
        weights = [c * _WEIGHTS if schedule.splits_backward else 0.0 for c in flops]
        of_inputs = [whole - part for whole, part in zip(backward, weights, strict=True)]
        speed = speed_up(simulate(schedule, flops, of_inputs, 0.0, weights)) * useful / sum((*flops, *backward))
        predicted = f"{speed * replicas:.2f} x one device"
    parts = "V M" if chunks > 1 else "3 M" if schedule.splits_backward else "M"
    formula = f"(K - 1) / ({parts} + K - 1)"
    numbers = f"K = {devices} devices, M = {count}" + (f", V = {chunks} chunks" if chunks > 1 else "")
    copies = f"{replicas} replicas x " if replicas > 1 else ""
    of_rows, batch = "", f"the batch of fit, in {copies}{count} micro-batches"
    if rows is not None:
        rows = math.ceil(rows / count / replicas)
        of_rows = f" of {rows} rows"
        batch = f"{copies}{count} micro-batches x {rows} rows = {replicas * count * rows} rows per step"
    return [
        f"Schedule: {schedule.name}, {count} micro-batches{of_rows}",
        f"Bubble: {schedule.bubble():.1%} = {formula}, {numbers}",
        f"Predicted speed-up: {predicted} (at most {devices * replicas})",
        f"Effective batch: {batch}",
    ]


def _size(size: float) -> str:
    """Bytes with a decimal prefix, in at most three digits."""
    exponent = 0
    while size >= 999.5 and exponent < len(_UNITS) - 1:
        size, exponent = size / 1000, exponent + 1
    return f"{size:.3g} {_UNITS[exponent]}B"


def _bytes_per_row(shape: tuple, dtype: str) -> float:
    return math.prod(dimension or 1 for dimension in shape[1:]) * tf.as_dtype(dtype).size
