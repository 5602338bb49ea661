"""A process of PyTorch: on its own, or a rank of DistributedDataParallel with gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.data_parallel.measure import StepClock, result
from benchmarks.data_parallel.models import (
    LEARNING_RATE,
    MODELS,
    MOMENTUM,
    Conv,
    Dense,
    Flatten,
    Layer,
    ModelShape,
    Pool,
    make_batch,
    shape_after,
)
from benchmarks.data_parallel.workload import Workload
from benchmarks.torch_ranks import together


def main(settings: dict) -> dict | None:
    """Trains the workload; rank 0 returns the result."""
    with together() as (rank, _):
        found = _train(Workload(**settings["workload"]), rank)
    return found if rank == 0 else None


def build(shape: ModelShape) -> nn.Sequential:
    """The model; images have their channels first, as PyTorch expects them."""
    modules: list[nn.Module] = []
    size = shape.input_shape
    for layer in shape.layers:
        modules += _modules(layer, size)
        size = shape_after(layer, size)
    return nn.Sequential(*modules)


def own_rows(shape: ModelShape, rows: int, rank: int, processes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's part of the batch that all train on; images have their channels first."""
    own = slice(rank * rows, (rank + 1) * rows)
    examples, labels = (torch.from_numpy(part)[own] for part in make_batch(shape, rows * processes))
    if examples.ndim == 4:
        examples = examples.permute(0, 3, 1, 2).contiguous()
    return examples, labels.long()


def _modules(layer: Layer, size: tuple[int, ...]) -> list[nn.Module]:
    match layer:
        case Conv(filters, kernel):
            return [_as_keras_starts(nn.Conv2d(size[-1], filters, kernel)), nn.ReLU()]
        case Pool(kernel):
            return [nn.MaxPool2d(kernel)]
        case Flatten():
            return [nn.Flatten()]
        case Dense(units, relu):
            return [_as_keras_starts(nn.Linear(size[-1], units)), *([nn.ReLU()] if relu else [])]


def _as_keras_starts(module: nn.Conv2d | nn.Linear) -> nn.Module:
    """Gives a layer the distribution of Keras' initial weights: the losses of all frameworks can be compared then."""
    nn.init.xavier_uniform_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def _train(workload: Workload, rank: int) -> dict:
    shape = MODELS[workload.model]
    examples, labels = own_rows(shape, workload.batch, rank, workload.processes)
    torch.manual_seed(1)
    model: nn.Module = build(shape)
    if workload.processes > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM)
    loss_function = nn.CrossEntropyLoss()
    # Summed up on the device, as Keras' metrics are, and read once at the end.
    loss_sum, correct = torch.zeros(()), torch.zeros((), dtype=torch.long)
    clock = StepClock(workload.warmup, workload.windows, workload.steps)
    for step in range(workload.total_steps):
        optimizer.zero_grad()
        logits = model(examples)
        loss = loss_function(logits, labels)
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
        correct += (logits.detach().argmax(1) == labels).sum()
        clock.tick(step + 1)
    rows = workload.batch * workload.total_steps
    return result(clock, _mean(loss_sum / workload.total_steps), _mean(correct / rows))


def _mean(value: torch.Tensor) -> float:
    if dist.is_initialized():
        dist.all_reduce(value)
        value = value / dist.get_world_size()
    return value.item()
