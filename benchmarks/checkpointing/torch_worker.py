"""A rank of PyTorch's DDP under `torchrun`: saves every few steps, and goes on where it was."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.checkpointing.step_log import StepWriter
from benchmarks.checkpointing.training import BATCH, LEARNING_RATE, MODEL, make_batch
from benchmarks.data_parallel.torch_worker import build


def main(folder: str, save_every: str, most_steps: str, timeout: str) -> None:
    """Trains until the log says stop.

    Args:
        folder: of the log and the checkpoint.
        save_every: steps between checkpoints.
        most_steps: steps after which it stops in any case.
        timeout: seconds that a collective may take: PyTorch notices by this that a peer hangs.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Not for init_process_group, where it would also limit how long ranks may wait for one another to start.
    group = dist.new_group(timeout=timedelta(seconds=float(timeout)))
    own = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    examples, labels = (torch.from_numpy(part)[own] for part in make_batch())
    labels = labels.long()
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(build(MODEL), process_group=group)
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    loss_function = nn.CrossEntropyLoss()
    path = Path(folder, "checkpoint.pt")
    step = _resume(path, model, optimizer)
    log = StepWriter(folder, rank)
    while step < int(most_steps):
        optimizer.zero_grad()
        loss_function(model(examples), labels).backward()
        optimizer.step()
        step += 1
        if log.write(step):
            break
        if rank == 0 and step % int(save_every) == 0:
            _save(path, step, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


def _save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, temporary)
    os.replace(temporary, path)


def _resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    if not path.exists():
        return 0
    saved = torch.load(path)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


if __name__ == "__main__":
    main(*sys.argv[1:])
