"""Processes of PyTorch that train together, with gloo."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist


@contextlib.contextmanager
def together() -> Iterator[tuple[int, int]]:
    """The rank of this process and the number of all, which are connected while the block runs; 0 and 1 if alone."""
    torch.set_num_threads(1)
    if "WORLD_SIZE" not in os.environ:
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
        # Rank 0 serves the rendezvous: it must not leave before the others.
        dist.barrier()
    finally:
        dist.destroy_process_group()
