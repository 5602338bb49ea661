"""A process with PyTorch: the whole model, or a stage of torch.distributed.pipelining with gloo. Rank 0 measures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.pipeline.shapes import LEARNING_RATE, SHAPES, DenseStack, Shape, TransformerStack
from benchmarks.process_files import announce, announced
from benchmarks.torch_ranks import together
from benchmarks.windows import Windows, steps_of_window


def main(settings: dict) -> list[dict] | None:
    """Measures all variants in turns; rank 0 returns a record of each."""
    with together() as (rank, count):
        torch.manual_seed(1)
        shape = SHAPES[settings["shape"]]
        batch = torch.rand(shape.batch_shape)
        if count == 1:
            pids, steps = [os.getpid()], [_whole_step(_layers(shape), batch)]
        else:
            announce(settings["folder"], rank)
            pids = announced(settings["folder"], count)
            steps = [_stage_step(shape, batch, variant["microbatches"]) for variant in settings["variants"]]
        records = measure(settings, steps, pids)
    return records if rank == 0 else None


def _layers(shape: Shape) -> list[nn.Module]:
    match shape:
        case DenseStack():
            return [nn.Sequential(nn.Linear(shape.width, shape.width), nn.ReLU()) for _ in range(shape.layers)]
        case TransformerStack():
            return [
                nn.TransformerEncoderLayer(shape.width, shape.heads, shape.hidden, dropout=0.0, batch_first=True)
                for _ in range(shape.blocks)
            ]


def _whole_step(layers: list[nn.Module], batch: torch.Tensor) -> Callable[[], None]:
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), batch).backward()
        optimizer.step()

    return step


def _stage_step(shape: Shape, batch: torch.Tensor, microbatches: int) -> Callable[[], None]:
    rank, count = dist.get_rank(), dist.get_world_size()
    layers = _layers(shape)
    each = len(layers) // count
    model = nn.Sequential(*layers[rank * each : (rank + 1) * each])
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    stage = PipelineStage(model, rank, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=nn.functional.mse_loss)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(batch)
        elif rank == count - 1:
            schedule.step(target=batch)
        else:
            schedule.step()
        optimizer.step()

    return step


def measure(settings: dict, steps: list[Callable[[], None]], pids: list[int]) -> list[dict]:
    """Windows of all variants in turns; a record of each."""
    counts = [_steps_of_window(step) for step in steps]
    windows = [Windows(pids) for _ in steps]
    for _ in range(settings["samples"]):
        for step, count, window in zip(steps, counts, windows, strict=True):
            step()
            wait_for_all()
            window.begin()
            for _ in range(count):
                step()
            wait_for_all()
            window.end(count)
    return [
        {"variant": variant, "steps": count, **window.record}
        for variant, count, window in zip(settings["variants"], counts, windows, strict=True)
    ]


def _steps_of_window(step: Callable[[], None]) -> int:
    step()
    wait_for_all()
    began = time.perf_counter()
    step()
    step()
    seconds = torch.tensor((time.perf_counter() - began) / 2)
    if dist.is_initialized():
        dist.broadcast(seconds, 0)
    return steps_of_window(seconds.item())


def wait_for_all() -> None:
    """Waits for all ranks."""
    if dist.is_initialized():
        dist.barrier()
