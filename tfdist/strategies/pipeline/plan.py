"""A model's stages: which layers they have, where they are, and the functions that run them."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
from collections.abc import Sequence
from typing import Any

import keras
from keras.src import tree
from keras.src.models.functional import Functional, unpack_singleton

from tfdist.layer_graph.chunk import Chunk, make_chunks
from tfdist.layer_graph.graph import LayerGraph
from tfdist.layer_graph.partition import Cost
from tfdist.memory.policy import MemoryPolicy
from tfdist.strategies.pipeline.chunk_functions import ChunkFunctions
from tfdist.strategies.pipeline.schedule import Schedule, forward_only

_log = logging.getLogger("tfdist")


@dataclasses.dataclass(eq=False)
class PipelinePlan:
    """How one model runs on several devices.

    Attributes:
        model: the model.
        functional: its graph of layers, as Keras has it.
        graph: the same, flat.
        costs: of each call.
        cuts: positions of the calls that each chunk after the first one begins with.
        devices: one for each stage, of the pipeline that the variables live on.
        others: the devices of further pipelines, which train the same variables.
        schedule: the order of the work in a training step.
        recompute: for each chunk, whether its backward pass runs the forward pass again.
        split_weights: whether weight gradients are made later, of several micro-batches at once.
        stays: how what is kept for backward passes spends the time until then on the host; `None`: on the device.
    """

    model: keras.Model
    functional: Functional
    graph: LayerGraph
    costs: Sequence[Cost]
    cuts: Sequence[int]
    devices: Sequence[str]
    others: Sequence[Sequence[str]]
    schedule: Schedule
    recompute: Sequence[bool]
    split_weights: bool
    stays: MemoryPolicy | None

    def __post_init__(self) -> None:
        self.decomposes = False
        self.refresh()
        self._told: set[str | None] = set()

    def refresh(self) -> None:
        """Forgets what was traced and which variables are trainable: the model may have changed since."""
        self.chunks = make_chunks(self.graph, self.cuts)
        self._functions: dict[tuple[int, bool], ChunkFunctions] = {}
        self.__dict__.pop("homes", None)

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

    def choose_schedule(self, planner: Any, obstacle: str | None) -> None:
        """Sets the schedule that the user wants, or the best one that the compiled loss allows.

        Args:
            planner: the `Planner`.
            obstacle: why the loss does not decompose over micro-batches; `None` if it does.
        """
        name = planner.schedule
        self.decomposes = obstacle is None
        if name == "auto":
            name = planner.best_schedule if self.decomposes else "gpipe"
        elif not self.decomposes and name != "gpipe" and obstacle not in self._told:
            self._told.add(obstacle)
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
        """The order of the work where nothing is trained, with no more micro-batches than rows if that is possible."""
        microbatches = self.schedule.microbatches
        if rows is not None:
            microbatches = max(1, min(rows // self.replicas, microbatches))
        return forward_only(len(self.devices), microbatches, self.schedule.chunks_per_device)

    @functools.cached_property
    def homes(self) -> dict[int, int]:
        """The chunk on whose device a variable lives, by the variable's id: the first one that uses it."""
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
        """The device on which a value is made; that of the first stage for the model's inputs."""
        return self.device_of(next((chunk.index for chunk in self.chunks if key in chunk.outputs), 0))

    @property
    def variables(self) -> list[tuple[keras.Variable, str]]:
        """All variables of the stages, with the device that each lives on."""
        found: dict[int, Any] = {}
        for chunk in self.chunks:
            for variable in (*chunk.trainable, *chunk.state):
                found.setdefault(id(variable), (variable, self.device_of(chunk.index)))
        return list(found.values())
