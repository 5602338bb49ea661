"""A process of PyTorch: alone, or a rank of DistributedDataParallel and FSDP2 with gloo. It trains all variants."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.network.torch_worker import LanguageModel, own_rows
from benchmarks.pipeline.torch_worker import measure, wait_for_all
from benchmarks.sharded import process
from benchmarks.sharded.variants import PLAIN, SHAPES, SHARDED
from benchmarks.torch_ranks import together


def main(settings: dict) -> list[dict] | None:
    """Measures all variants; rank 0 returns a record of each."""
    with together() as (rank, count):
        records = _measure(settings, rank, count)
    return records if rank == 0 else None


def _measure(settings: dict, rank: int, count: int) -> list[dict]:
    trainings = [_Training(settings, variant, rank, count) for variant in settings["variants"]]
    if settings["measure"] == "time":
        settings = {**settings, "samples": settings["windows"]}
        return measure(settings, [training.step for training in trainings], [os.getpid()])
    found = []
    for training in trainings:
        training.steps()
        wait_for_all()
        found.append(
            {"sent": process.sent(training.steps)}
            if settings["measure"] == "sent"
            else process.memory(training.steps, training.held)
        )
    return found


class _Training:
    """A model, its optimizer and its data."""

    def __init__(self, settings: dict, variant: str, rank: int, count: int):
        torch.manual_seed(1)
        shape = SHAPES[settings["shape"]]
        self._inputs, self._targets = own_rows(shape, settings["rows"], rank, count)
        self._model: nn.Module = LanguageModel(shape)
        if count > 1:
            self._model = _replicated(self._model, variant, count)
        self._optimizer = torch.optim.Adam(self._model.parameters())

    def step(self) -> None:
        logits = self._model(self._inputs)
        nn.functional.cross_entropy(logits.flatten(0, 1), self._targets).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def steps(self, count: int = process.STEPS) -> None:
        for _ in range(count):
            self.step()
        wait_for_all()

    def held(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self._model.parameters():
            slots = [slot for slot in self._optimizer.state[parameter].values() if isinstance(slot, torch.Tensor)]
            for tensor in (parameter, parameter.grad, *slots):
                if tensor is not None:
                    yield tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _replicated(model: LanguageModel, variant: str, count: int) -> nn.Module:
    if variant == PLAIN:
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (count,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=variant == SHARDED)
    return fully_shard(model, mesh=mesh)
