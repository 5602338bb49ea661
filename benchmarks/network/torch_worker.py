"""A process of PyTorch, with DistributedDataParallel and its communication hooks."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.network.shape import BATCH, BLOCKS, HEADS, LEARNING_RATE, LENGTH, MOMENTUM, VOCABULARY, WIDTH
from benchmarks.network.windows import Windows


class LanguageModel(nn.Module):
    """The model of keras_worker."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        block = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **block) for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def main(text: str, path: str) -> None:
    """Trains, and lets rank 0 write what it took."""
    settings = json.loads(text)
    torch.set_num_threads(1)
    is_alone = settings["processes"] == 1
    rank = 0
    if not is_alone:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    loss = train(settings, rank, path, is_alone)
    if not is_alone:
        # Rank 0 serves the rendezvous: it must not leave before the others.
        dist.barrier()
        dist.destroy_process_group()
    print(loss)


def train(settings: dict[str, Any], rank: int, path: str, is_alone: bool) -> float:
    """One training."""
    torch.manual_seed(1)
    rows = torch.randint(0, VOCABULARY, (BATCH * settings["processes"], LENGTH + 1))[rank * BATCH : (rank + 1) * BATCH]
    inputs, targets = rows[:, :-1], rows[:, 1:].reshape(-1)
    model: nn.Module = LanguageModel()
    if not is_alone:
        model = nn.parallel.DistributedDataParallel(model)
        if settings["method"] == "bf16":
            model.register_comm_hook(None, default_hooks.bf16_compress_hook)
        if settings["method"] == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM)
    windows = Windows(settings, is_alone)
    for step in range(windows.total):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).reshape(-1, VOCABULARY), targets)
        loss.backward()
        optimizer.step()
        windows.ended(step + 1)
    if rank == 0:
        windows.write(path, loss.item())
    return loss.item()


if __name__ == "__main__":
    main(*sys.argv[1:])
