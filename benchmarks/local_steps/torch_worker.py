"""A worker of PyTorch, alone or one of two that average their weights now and then (post_localSGD)."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from benchmarks.data_parallel.data import make_batch
from benchmarks.data_parallel.models import LEARNING_RATE, MODELS, MOMENTUM
from benchmarks.data_parallel.torch_worker import build
from benchmarks.network.windows import Windows


def main(text: str, path: str) -> None:
    """Trains, and lets rank 0 write how long the steps of each window took."""
    settings = json.loads(text)
    torch.set_num_threads(1)
    is_alone = settings["processes"] == 1
    if not is_alone:
        dist.init_process_group("gloo")
    rank = 0 if is_alone else dist.get_rank()
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
    if rank == 0:
        windows.write(path, loss.item())
    if not is_alone:
        # Rank 0 serves the rendezvous: it must not leave before the others.
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
