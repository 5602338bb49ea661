"""A worker of PyTorch, alone or one of two that average their weights now and then (post_localSGD)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks.data_parallel.models import LEARNING_RATE, MODELS, MOMENTUM
from benchmarks.data_parallel.torch_worker import build, own_rows
from benchmarks.network.windows import Windows
from benchmarks.torch_ranks import together


def main(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Trains, and lets rank 0 return how long the steps of each window took."""
    with together() as (rank, count):
        found = _train(settings, rank, is_alone=count == 1)
    return found if rank == 0 else None


def _train(settings: dict[str, Any], rank: int, is_alone: bool) -> dict[str, Any]:
    shape = MODELS[settings["model"]]
    examples, labels = own_rows(shape, settings["batch"], rank, settings["processes"])
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
