"""A worker of PyTorch, alone or one of two that average their weights now and then (post_localSGD)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks.data_parallel.models import LEARNING_RATE, MODELS, MOMENTUM, make_batch
from benchmarks.data_parallel.torch_worker import build
from benchmarks.network.windows import Windows
from benchmarks.torch_ranks import together


def main(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Trains, and lets rank 0 return how long the steps of each window took."""
    with together() as (rank, count):
        found = _train(settings, rank, is_alone=count == 1)
    return found if rank == 0 else None


def _train(settings: dict[str, Any], rank: int, is_alone: bool) -> dict[str, Any]:
    shape, rows = MODELS[settings["model"]], settings["batch"]
    examples, labels = (torch.from_numpy(part) for part in make_batch(shape, rows * settings["processes"]))
    own = slice(rank * rows, (rank + 1) * rows)
    examples, labels = examples[own], labels[own].long()
    if examples.ndim == 4:
        examples = examples.permute(0, 3, 1, 2).contiguous()
    torch.manual_seed(1)
    model = build(shape)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM)
    averager = None if is_alone else PeriodicModelAverager(period=settings["sync_every"], warmup_steps=0)
    windows = Windows({**settings, "warmup": settings["steps"]}, is_alone)
    loss_function = nn.CrossEntropyLoss()
    for step in range(windows.total):
        optimizer.zero_grad()
        loss = loss_function(model(examples), labels)
        loss.backward()
        optimizer.step()
        if averager is not None:
            averager.average_parameters(model.parameters())
        windows.ended(step + 1)
    return windows.result(loss.item())
