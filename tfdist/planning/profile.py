"""What a training step of a model costs, as numbers. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.memory.estimation.block_costs import BlockCost
from tfdist.planning.hardware import Device


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a part of a step costs.

    Attributes:
        flops: floating-point operations.
        bytes: read and written by all operations.
        operations: how many there are.

    Example:
        >>> device = Device(flops=1e9, bandwidth=1e9, operation=1e-6, memory=10**9)
        >>> round(StepCost(flops=1e6, bytes=2e6, operations=1000).seconds(device), 6)
        0.004
    """

    flops: float
    bytes: float
    operations: float

    def seconds(self, device: Device) -> float:
        """How long it takes: operations do not wait for memory while they compute, nor the other way round."""
        return self.flops / device.flops + self.bytes / device.bandwidth + self.operations * device.operation

    def towards(self, other: StepCost, share: float) -> StepCost:
        """What lies at a share of the way from this to another one, never below zero."""
        return StepCost(
            *(
                max(a + share * (b - a), 0.0)
                for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
            )
        )


@dataclasses.dataclass(frozen=True)
class Sample:
    """A step for a number of rows, on one device.

    Attributes:
        rows: of the batch.
        compute: forward and backward pass.
        update: of the weights.
        batch: bytes of the inputs and targets.
        peak: bytes of what the step makes, at the most.
        blocks: what each block of the model keeps and computes.
    """

    rows: int
    compute: StepCost
    update: StepCost
    batch: float
    peak: float
    blocks: Sequence[BlockCost]


@dataclasses.dataclass(frozen=True)
class LayerProfile:
    """One call of a layer.

    Attributes:
        name: of the layer.
        work: operations of the forward pass of a row, and ten for each byte that it makes.
        parameters: bytes of the variables that it is the first to use.
        outputs: bytes of what it makes of a row.
        arrives: bytes of a row that a cut before it would send.
        cuttable: whether the model may be cut before it.
    """

    name: str
    work: float
    parameters: float
    outputs: float
    arrives: float
    cuttable: bool = True


@dataclasses.dataclass(frozen=True)
class ModelProfile:
    """A model, its optimizer and its batch.

    Attributes:
        name: of the model.
        rows: of the global batch.
        weights: bytes of all variables.
        trainable: bytes of those that are trained, and so of the gradients.
        slots: bytes of the optimizer's variables.
        samples: a step with few rows, and one with all.
        layers: calls of layers in their order; empty if the model is no graph of layers, and cannot be cut.
        normalizations: how many layers exchange statistics of the batch.
        notes: what is not known about it.
    """

    name: str
    rows: int
    weights: float
    trainable: float
    slots: float
    samples: tuple[Sample, Sample]
    layers: Sequence[LayerProfile] = ()
    normalizations: int = 0
    notes: Sequence[str] = ()

    def at(self, rows: float) -> Sample:
        """A step for another number of rows: all grows with them in proportion, from a part that does not."""
        few, many = self.samples
        share = (rows - few.rows) / (many.rows - few.rows) if many.rows > few.rows else 1.0

        def between(a: float, b: float) -> float:
            return max(a + share * (b - a), 0.0)

        blocks = [
            BlockCost(b.name, between(a.kept, b.kept), between(a.inputs, b.inputs), between(a.flops, b.flops))
            for a, b in zip(few.blocks, many.blocks, strict=True)
        ]
        return Sample(
            round(rows),
            few.compute.towards(many.compute, share),
            few.update.towards(many.update, share),
            between(few.batch, many.batch),
            between(few.peak, many.peak),
            blocks,
        )
