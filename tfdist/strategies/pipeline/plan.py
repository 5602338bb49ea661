"""How a model runs on several devices: where it is cut, which device has which part, in which order they work.

`Planner` holds the arguments of the strategy; it makes a `PipelinePlan` for each model.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
import functools
import logging
import os
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import tree

from tfdist.arguments import check_count
from tfdist.compat.upstream import Functional, device_lib, unpack_singleton
from tfdist.layer_graph.chunk import Chunk, make_chunks, uncuttable
from tfdist.layer_graph.costs import costs_of, crossing, measured_costs, weights
from tfdist.layer_graph.graph import LayerGraph, flatten
from tfdist.layer_graph.partition import Cost, balance
from tfdist.memory.policy import MODES, MemoryPolicy, policy_of
from tfdist.strategies.pipeline.chunk_functions import ChunkFunctions
from tfdist.strategies.pipeline.cuts import cuts_from_names, stages_of
from tfdist.strategies.pipeline.schedule import Schedule, forward_only, make_schedule

_log = logging.getLogger("tfdist")

SCHEDULES = ("auto", "gpipe", "1f1b", "eager-1f1b", "interleaved")
BALANCES = ("flops", "memory", "time")
WEIGHT_GRADIENTS = ("accumulate", "batched")

# The rows of a batch for which costs are estimated. Only the ratios of costs count; they hardly depend on it.
_ROWS = 16
# The cost of sending a byte to another stage, in operations that a core could do in that time (some tens of GFLOP/s,
# against a few GB/s). It decides only between cuts that balance the work equally well.
_FLOPS_PER_BYTE = 20.0


@dataclasses.dataclass(eq=False)
class PipelinePlan:
    """How one model runs on several devices.

    Attributes:
        model: the model.
        functional: its graph of layers, as Keras has it.
        graph: the same, flat.
        costs: the cost of each call.
        cuts: positions of the calls that each chunk after the first one begins with.
        devices: one for each stage, of the pipeline that the variables are on.
        others: the devices of further pipelines, which train the same variables.
        schedule: the order of the work in a training step.
        modes: for each chunk, the memory mode: what it keeps for the backward pass, and where.
        split_weights: whether weight gradients are made later, of several micro-batches at once.
        policy: to which host what is swapped goes, and when it comes back.
    """

    model: keras.Model
    functional: Functional
    graph: LayerGraph
    costs: Sequence[Cost]
    cuts: Sequence[int]
    devices: Sequence[str]
    others: Sequence[Sequence[str]]
    schedule: Schedule
    modes: Sequence[str]
    split_weights: bool
    policy: MemoryPolicy

    def __post_init__(self) -> None:
        self.decomposes = False
        self.refresh()
        # Obstacles of which a warning has been logged.
        self._warned_of: set[str | None] = set()

    def refresh(self) -> None:
        """Forgets the traced functions and which variables are trainable: the model may have changed since."""
        self.chunks = make_chunks(self.graph, self.cuts)
        self._functions: dict[tuple[int, bool], ChunkFunctions] = {}
        self.__dict__.pop("homes", None)

    @property
    def recompute(self) -> list[bool]:
        """For each chunk, whether its backward pass runs the forward pass again."""
        return [mode in ("recompute", "recompute+swap") for mode in self.modes]

    @property
    def swap(self) -> list[bool]:
        """For each chunk, whether what it keeps is on the host until its backward pass."""
        return [mode in ("swap", "recompute+swap") for mode in self.modes]

    def functions(self, chunk: Chunk, training: bool) -> ChunkFunctions:
        """The traced passes of a chunk."""
        key = chunk.index, training
        if key not in self._functions:
            self._functions[key] = ChunkFunctions(
                chunk, self.model, training, self.recompute[chunk.index], self.split_weights
            )
        return self._functions[key]

    def costs_of_chunk(self, chunk: int) -> Sequence[Cost]:
        """Costs of a chunk's calls."""
        bounds = (0, *self.cuts, len(self.graph.calls))
        return self.costs[bounds[chunk] : bounds[chunk + 1]]

    def device_of(self, chunk: int) -> str:
        """The device that runs a chunk."""
        return self.devices[self.schedule.device_of(chunk)]

    def pack_outputs(self, tensors: list[Any]) -> Any:
        """The structure that calling the model returns."""
        return unpack_singleton(tree.pack_sequence_as(self.functional._outputs_struct, tensors))

    def choose_schedule(self, planner: Planner, obstacle: str | None) -> None:
        """Sets the schedule that the user wants, or the best one that the compiled loss allows.

        Args:
            planner: the `Planner`.
            obstacle: why the loss does not decompose over micro-batches; `None` if it does.
        """
        name = planner.schedule
        self.decomposes = obstacle is None
        if name == "auto":
            name = planner.best_schedule if self.decomposes else "gpipe"
        elif not self.decomposes and name != "gpipe" and obstacle not in self._warned_of:
            self._warned_of.add(obstacle)
            _log.warning(
                "schedule=%r is run as 'gpipe': all micro-batches go forward before the first one goes back, because "
                "%s. It trains the same, and keeps more activations.",
                name,
                obstacle,
            )
        if not self.decomposes:
            name = "gpipe"
        if self.schedule.name != name:
            self.schedule = planner.make_schedule(name)

    def inference_of(self, rows: int | None) -> Schedule:
        """The order of the work where nothing is trained: with no more micro-batches than there are rows, if known."""
        microbatches = self.schedule.microbatches
        if rows is not None:
            microbatches = max(1, min(rows // self.replicas, microbatches))
        return forward_only(len(self.devices), microbatches, self.schedule.chunks_per_device)

    @functools.cached_property
    def homes(self) -> dict[int, int]:
        """The chunk on whose device a variable is, by the variable's id: the first chunk that uses it."""
        homes: dict[int, int] = {}
        for chunk in self.chunks:
            for variable in (*chunk.trainable, *chunk.state):
                homes.setdefault(id(variable), chunk.index)
        return homes

    @property
    def replicas(self) -> int:
        """The number of pipelines."""
        return 1 + len(self.others)

    @property
    def pipelines(self) -> list[PipelinePlan]:
        """A plan for each pipeline alone; they share what is traced."""
        return [self, *(self._on(devices) for devices in self.others)]

    def _on(self, devices: Sequence[str]) -> PipelinePlan:
        other = copy.copy(self)
        other.devices, other.others = devices, ()
        return other

    def device_of_value(self, key: int) -> str:
        """The device on which a value is computed; that of the first stage for the model's inputs."""
        return self.device_of(next((chunk.index for chunk in self.chunks if key in chunk.outputs), 0))

    @property
    def variables(self) -> list[tuple[keras.Variable, str]]:
        """All variables of the stages, with the device that each of them is on."""
        found: dict[int, Any] = {}
        for chunk in self.chunks:
            for variable in (*chunk.trainable, *chunk.state):
                found.setdefault(id(variable), (variable, self.device_of(chunk.index)))
        return list(found.values())


class Planner:
    """Makes plans from the arguments of `PipelineStrategy`.

    Raises:
        ValueError: for a wrong argument.
    """

    def __init__(
        self,
        devices: Sequence[Sequence[str]],
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
        (self.devices, *self.others), self.num_microbatches, self.schedule = devices, num_microbatches, schedule
        self.chunks_per_device, self.cuts, self.balance = chunks_per_device, cuts, balance
        self.split_weights = weight_gradients == "batched"
        self.policy = None if memory is None else _policy_for_stages(memory, self.chunks)

    @property
    def chunks(self) -> int:
        """The number of pieces that a model is cut into."""
        return len(self.devices) * self.chunks_per_device

    def plan(self, model: keras.Model, functional: Functional) -> PipelinePlan:
        """Cuts a model.

        Args:
            model: the model.
            functional: its graph of layers.

        Raises:
            ValueError: if it cannot be cut into as many pieces, or not where the user wants.
        """
        graph, positions = self._cut(flatten(functional))
        schedule = self.make_schedule("gpipe" if self.schedule == "auto" else self.schedule)
        costs = costs_of(graph, _ROWS)
        policy = self.policy or MemoryPolicy("none")
        return PipelinePlan(
            model,
            functional,
            graph,
            costs,
            positions,
            self.devices,
            self.others,
            schedule,
            [policy.mode_of(name) for name in stage_names(self.chunks)],
            self.split_weights,
            policy,
        )

    def choose_recompute(self, plan: PipelinePlan, rows: int) -> None:
        """Without a memory policy, decides which chunks recompute: that depends on the batch size.

        Args:
            plan: the plan.
            rows: of a training batch.
        """
        if self.policy is None:
            needed = [self._needs_recompute(plan, chunk.index, rows) for chunk in plan.chunks]
            plan.modes = ["recompute" if is_needed else "none" for is_needed in needed]

    def _needs_recompute(self, plan: PipelinePlan, chunk: int, rows: int) -> bool:
        """Whether the outputs of a chunk's layers, for all micro-batches in flight, fill over half of the memory."""
        in_flight = max(self.make_schedule("gpipe" if self.schedule == "auto" else self.schedule).in_flight())
        per_row = sum(cost.output_bytes for cost in plan.costs_of_chunk(chunk)) / _ROWS
        rows_in_flight = rows / plan.replicas / self.num_microbatches * in_flight
        return per_row * rows_in_flight > _memory_limit(plan.device_of(chunk), self.devices) / 2

    @property
    def best_schedule(self) -> str:
        """The best schedule for a loss that decomposes: between processes, transfers take time, which can be hidden."""
        specs = map(tf.DeviceSpec.from_string, self.devices)
        return "eager-1f1b" if len({(spec.job, spec.task) for spec in specs}) > 1 else "1f1b"

    def make_schedule(self, name: str) -> Schedule:
        """The order of the work in a training step."""
        return make_schedule(name, len(self.devices), self.num_microbatches, self.chunks_per_device)

    def _cut(self, graph: LayerGraph) -> tuple[LayerGraph, tuple[int, ...]]:
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
        parted = sorted(uncuttable(graph) & set(positions))
        if parted:
            raise ValueError(
                f"Received: a cut before layer '{graph.calls[parted[0]].name}', between two calls of a layer that has "
                "a state (statistics, or seeds). Its calls have to be on one stage. Expected: a cut elsewhere."
            )
        return graph, tuple(positions)


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"Received: {name}={value!r}. Expected one of {', '.join(map(repr, choices))}.")


def stage_names(count: int) -> list[str]:
    """The names of the stages, or of an interleaved schedule's chunks, for a memory policy.

    Example:
        >>> stage_names(2)
        ['stage_0', 'stage_1']
    """
    return [f"stage_{index}" for index in range(count)]


def _policy_for_stages(memory: MemoryPolicy | str, chunks: int) -> MemoryPolicy:
    """The policy that is meant, whose blocks are the stages."""
    policy, names = policy_of(memory), stage_names(chunks)
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
