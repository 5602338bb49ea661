"""A process of PyTorch: alone, or a rank of DistributedDataParallel and FSDP2 with gloo. It trains all variants."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.network.torch_worker import LanguageModel, own_rows
from benchmarks.pipeline.torch_worker import measure, together
from benchmarks.sharded import process
from benchmarks.sharded.variants import PLAIN, SHAPES, SHARDED


def main(text: str, path: str) -> None:
    """Measures all variants; rank 0 writes a record of each."""
    settings = json.loads(text)
    torch.set_num_threads(1)
    rank, is_alone = 0, "WORLD_SIZE" not in os.environ
    if not is_alone:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    records = _measure(settings, rank, is_alone)
    if rank == 0:
        Path(path).write_text(json.dumps(records))
    if not is_alone:
        # Rank 0 serves the rendezvous: it must not leave before the others.
        dist.barrier()
        dist.destroy_process_group()


def _measure(settings: dict, rank: int, is_alone: bool) -> list[dict]:
    trainings = [_Training(settings, variant, rank, is_alone) for variant in settings["variants"]]
    if settings["measure"] == "time":
        settings = {**settings, "samples": settings["windows"]}
        return measure(settings, [training.step for training in trainings], [os.getpid()])
    found = []
    for training in trainings:
        training.steps()
        together()
        found.append(
            {"sent": process.sent(training.steps)}
            if settings["measure"] == "sent"
            else process.memory(training.steps, training.held)
        )
    return found


class _Training:
    """A model, its optimizer and its data."""

    def __init__(self, settings: dict, variant: str, rank: int, is_alone: bool):
        torch.manual_seed(1)
        shape = SHAPES[settings["shape"]]
        count = 1 if is_alone else dist.get_world_size()
        self._inputs, self._targets = own_rows(shape, settings["rows"], rank, count)
        self._model: nn.Module = LanguageModel(shape)
        if not is_alone:
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
        together()

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


if __name__ == "__main__":
    main(*sys.argv[1:])
