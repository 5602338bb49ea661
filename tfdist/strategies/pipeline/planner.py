"""Decides how a model is cut, and in which order its stages work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from tfdist.arguments import check_count
from tfdist.layer_graph.chunk import uncuttable
from tfdist.layer_graph.costs import costs_of, crossing, measured_costs, weights
from tfdist.layer_graph.graph import LayerGraph, flatten
from tfdist.layer_graph.partition import balance
from tfdist.memory.policy import MODES, MemoryPolicy, policy_of
from tfdist.strategies.pipeline.cut_names import cuts_from_names
from tfdist.strategies.pipeline.memory_limit import memory_limit
from tfdist.strategies.pipeline.plan import PipelinePlan
from tfdist.strategies.pipeline.schedule import Schedule, make_schedule
from tfdist.strategies.pipeline.stage_scope import stages_of

SCHEDULES = ("auto", "gpipe", "1f1b", "eager-1f1b", "interleaved")
BALANCES = ("flops", "memory", "time")
WEIGHT_GRADIENTS = ("accumulate", "batched")


class Planner:
    """Makes plans; the arguments are those of `PipelineStrategy`.

    Raises:
        ValueError: for an argument that makes no sense.
    """

    def __init__(
        self,
        devices: Sequence[Sequence[str]],
        microbatches: int,
        schedule: str,
        chunks_per_device: int | None,
        cuts: Sequence[str] | None,
        balance: str,
        recompute: bool | str | Sequence[bool],
        weight_gradients: str,
        memory: MemoryPolicy | str | None = None,
    ):
        _check_choice("schedule", schedule, SCHEDULES)
        _check_choice("balance", balance, BALANCES)
        _check_choice("weight_gradients", weight_gradients, WEIGHT_GRADIENTS)
        check_count("microbatches", microbatches)
        if chunks_per_device is None:
            chunks_per_device = 2 if schedule == "interleaved" else 1
        check_count("chunks_per_device", chunks_per_device)
        if chunks_per_device > 1 and schedule != "interleaved":
            raise ValueError(
                f"Received: chunks_per_device={chunks_per_device} with schedule={schedule!r}. Expected: "
                "schedule='interleaved', the only one that gives a device several chunks of the model."
            )
        (self.devices, *self.others), self.microbatches, self.schedule = devices, microbatches, schedule
        self.chunks_per_device, self.cuts, self.balance = chunks_per_device, cuts, balance
        self.split_weights = weight_gradients == "batched"
        self.recompute = _recompute(recompute, self.chunks)
        self.stays: MemoryPolicy | None = None
        if memory is not None:
            policy = _policy(memory, recompute)
            self.recompute = (policy.mode in ("recompute", "park"),) * self.chunks
            self.stays = policy if policy.mode in ("park", "swap") else None

    @property
    def chunks(self) -> int:
        """Into how many pieces a model is cut."""
        return len(self.devices) * self.chunks_per_device

    def plan(self, model: keras.Model, functional: Functional) -> PipelinePlan:
        """Cuts a model.

        Args:
            model: the model.
            functional: its graph of layers.

        Raises:
            ValueError: if it cannot be cut into as many pieces, or not where the user wants.
        """
        graph = flatten(functional)
        graph, positions = self._cut(graph)
        schedule = self.make_schedule("gpipe" if self.schedule == "auto" else self.schedule)
        costs = costs_of(graph, _ROWS)
        plan = PipelinePlan(
            model,
            functional,
            graph,
            costs,
            positions,
            self.devices,
            self.others,
            schedule,
            self.recompute or (False,) * self.chunks,
            self.split_weights,
            self.stays,
        )
        return plan

    def choose_recompute(self, plan: PipelinePlan, rows: int) -> None:
        """Decides which chunks recompute, where that is left to the batch size.

        Args:
            plan: the plan.
            rows: of a training batch.
        """
        if self.recompute is None:
            plan.recompute = [self._needs_recompute(plan, chunk.index, rows) for chunk in plan.chunks]

    def _needs_recompute(self, plan: PipelinePlan, chunk: int, rows: int) -> bool:
        """Whether what the layers of a chunk return, for all micro-batches in flight, takes half of the memory."""
        in_flight = max(self.make_schedule("gpipe" if self.schedule == "auto" else self.schedule).in_flight())
        per_row = sum(cost.output_bytes for cost in plan.costs_of_chunk(chunk)) / _ROWS
        rows_in_flight = rows / plan.replicas / self.microbatches * in_flight
        return per_row * rows_in_flight > memory_limit(plan.device_of(chunk), self.devices) / 2

    @property
    def best_schedule(self) -> str:
        """The schedule for a loss that decomposes: between processes, transfers take time that can be hidden."""
        specs = map(tf.DeviceSpec.from_string, self.devices)
        return "eager-1f1b" if len({(spec.job, spec.task) for spec in specs}) > 1 else "1f1b"

    def make_schedule(self, name: str) -> Schedule:
        """The order of the work in a training step."""
        return make_schedule(name, len(self.devices), self.microbatches, self.chunks_per_device)

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


# What is balanced are ratios; they hardly depend on the number of rows.
_ROWS = 16
# What sending a byte to another stage costs, in operations that could be done in that time: a few GB/s, and some tens
# of GFLOP/s a core. Only ties between good cuts are decided by it.
_FLOPS_PER_BYTE = 20.0


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"Received: {name}={value!r}. Expected one of {', '.join(map(repr, choices))}.")


def _recompute(value: bool | str | Sequence[bool], chunks: int) -> tuple[bool, ...] | None:
    """For each chunk; `None`: to be decided when the batch size is known."""
    if isinstance(value, bool):
        return (value,) * chunks
    if value == "auto":
        return None
    values = tuple(value)
    if len(values) != chunks or not all(isinstance(v, bool) for v in values):
        raise ValueError(
            f"Received: recompute={value!r}. Expected: True, False, 'auto', or {chunks} of True and False, one for "
            "each piece of the model."
        )
    return values


def _policy(memory: MemoryPolicy | str, recompute: Any) -> MemoryPolicy:
    """The policy of all stages."""
    if recompute != "auto":
        raise ValueError(
            f"Received: memory={memory!r} and recompute={recompute!r}. Expected: one of the two; recompute=True is "
            "memory='recompute'."
        )
    policy = policy_of(memory)
    if policy.mode not in MODES or policy.blocks != "auto":
        raise ValueError(
            f"Received: memory={memory!r} for a PipelineStrategy, whose blocks are the stages' pieces of the model. "
            "Expected: one mode for all of them, such as 'park' or MemoryPolicy('swap', min_bytes=1 << 20), without "
            "`blocks`; or recompute='auto', or recompute=[True, False, ...] for each piece."
        )
    return policy
