"""A process of PyTorch, with DistributedDataParallel and its communication hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from benchmarks.network.shape import BATCH, LEARNING_RATE, MOMENTUM, SHAPE, Shape
from benchmarks.network.windows import Windows
from benchmarks.torch_ranks import together


class LanguageModel(nn.Module):
    """The model of keras_worker."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.embedding = nn.Embedding(shape.vocabulary, width)
        block = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        blocks = [nn.TransformerEncoderLayer(width, shape.heads, 4 * width, **block) for _ in range(shape.blocks)]
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, shape.vocabulary)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(shape.length))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of the next tokens."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(x))


def own_rows(shape: Shape, rows: int, rank: int, processes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tokens, and the next ones, which are to be predicted."""
    batch = torch.randint(0, shape.vocabulary, (rows * processes, shape.length + 1))
    own = batch[rank * rows : (rank + 1) * rows]
    return own[:, :-1], own[:, 1:].flatten()


def main(settings: dict[str, Any]) -> dict[str, Any] | None:
    """Trains, and lets rank 0 return what it took."""
    with together() as (rank, count):
        found = _train(settings, rank, is_alone=count == 1)
    return found if rank == 0 else None


def _train(settings: dict[str, Any], rank: int, is_alone: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    inputs, targets = own_rows(SHAPE, BATCH, rank, settings["processes"])
    model: nn.Module = LanguageModel(SHAPE)
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
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets)
        loss.backward()
        optimizer.step()
        windows.ended(step + 1)
    return windows.result(loss.item())
