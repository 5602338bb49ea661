"""Chooses for each block of a model what is kept of it, so that a training step fits into a budget."""

from __future__ import annotations

import dataclasses
import glob
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from rich.box import SIMPLE_HEAD
from rich.table import Table

from tfdist.memory.estimation.block_options import (
    BlockCost,
    Option,
    Rates,
    assign,
    block_costs,
    measured_rates,
    options,
    peak,
)
from tfdist.memory.estimation.estimate import Estimate, estimate
from tfdist.memory.estimation.liveness import MARGIN
from tfdist.memory.estimation.trace import short_device
from tfdist.memory.estimation.validation import batch_from, check_chosen
from tfdist.memory.modes import contents_of, under
from tfdist.memory.policy import MODES, MemoryPolicy, bytes_of_budget
from tfdist.plain_text import plain_text

_log = logging.getLogger("tfdist")
_ATTEMPTS = 6
# The search ends when this share of the budget is used.
_NEAR = 0.97


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen, and why. Print it for a table.

    Attributes:
        policy: to be applied.
        budget: bytes that a device may hold.
        plain: bytes that it would hold if everything was kept, with a margin for what the estimate does not know.
        chosen: bytes that it holds under the policy, with the same margin.
        blocks: what each block keeps and computes.
        options: what was chosen for each block.
        rates: how fast the device is, which decides between computing again and sending.
        layers: the first and the last layer of each block, by its name; nothing where blocks are layers.
    """

    policy: MemoryPolicy
    budget: int
    plain: int
    chosen: int
    blocks: Sequence[BlockCost]
    options: Sequence[Option]
    rates: Rates
    layers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def added(self) -> float:
        """Added time, as a share of the time of a step that keeps everything; a backward pass counts as two forward."""
        step = 3 * sum(block.flops for block in self.blocks) / self.rates.flops
        return sum(option.seconds for option in self.options) / step if step else 0.0

    def __str__(self) -> str:
        table = Table(box=SIMPLE_HEAD)
        for name in ("block", "mode", "keeps, MB", "instead of, MB", "forward pass, %", "added time, %"):
            table.add_column(name, justify="left" if name in ("block", "mode") else "right")
        if self.layers:
            table.add_column("layers", no_wrap=True)
        flops = sum(block.flops for block in self.blocks) or 1.0
        for block, option in zip(self.blocks, self.options, strict=True):
            share, added = block.flops / flops, option.seconds * self.rates.flops / (3 * flops)
            saved = "" if option.mode == "none" else f"{block.kept / 1e6:.2f}"
            numbers = (f"{option.kept / 1e6:.2f}", saved, f"{100 * share:.1f}", f"{100 * added:.1f}")
            of_block = [self.layers.get(block.name, "")] if self.layers else []
            table.add_row(block.name, option.mode, *numbers, *of_block)
        return f"{self.summary}\n\n{plain_text(table)}"

    @property
    def summary(self) -> str:
        """One line."""
        changed = sum(option.mode != "none" for option in self.options)
        return (
            f"{changed} of {len(self.blocks)} blocks keep less: a step needs {self.chosen / 1e6:.4g} MB of a budget of "
            f"{self.budget / 1e6:.4g} MB (everything kept: {self.plain / 1e6:.4g} MB), and about "
            f"{100 * self.added:.0f} % more time."
        )


def choose(
    model: keras.Model, batch_size: int | None = None, policy: MemoryPolicy | None = None, *, data: Any = None
) -> Choice:
    """Chooses a mode for each block so that the peak of a training step fits a budget at about the least added time.

    Steps are estimated as by `tfdist.memory.report`, a few of them (seconds for each, in a deep model), with a margin
    of a tenth for what they make. What `report` does not know is not in the budget: what loops of recurrent layers
    keep, and how XLA orders a step; a warning says so. How fast the device and its link to the host are is measured in
    some tenths of a second. On a machine whose only device
    is the host, and where XLA compiles the model, blocks are run again or left alone, and nothing is sent. With several
    processes all of them call this, and choose the same.

    Args:
        model: as for `report`, but not under `HostOffloadStrategy`.
        batch_size: rows of the global batch, as in `fit`.
        policy: `MemoryPolicy("auto", budget="8GB")`, with blocks, host and so on if they matter. The budget is what
            each device may hold: weights, slots, the batch, and what the step makes.
        data: a batch of arrays instead of `batch_size`, as for `report`.

    Returns:
        The choice, whose `policy` can be applied; nothing is applied here.

    Raises:
        ValueError: if not even the modes that keep the least fit: it says what they need; or as for `report`.

    Example:
        >>> import keras, tfdist
        >>> layers = [keras.Input((64,)), *(keras.layers.Dense(64, "gelu") for _ in range(9))]
        >>> model = keras.Sequential(layers)
        >>> model.compile("sgd", "mse")
        >>> choice = tfdist.memory.choose(model, 1024, tfdist.memory.MemoryPolicy("auto", budget="8 MB"))
        >>> choice.chosen <= 8e6 < choice.plain
        True
    """
    with batch_from(model, "choose", batch_size, data) as batch:
        return choose_for(model, batch, policy)


def choose_for(model: keras.Model, batch: Any, policy: MemoryPolicy) -> Choice:
    """Does what `choose` does, for a batch of these specifications."""
    check_chosen(model, policy)
    # Plans: one keeps everything; then one for each other mode, used for all blocks; then mixtures of modes.
    _log.info(
        "Model '%s': estimating a training step under 1 to %d plans, each of which is traced, to fit it into %s.",
        model.name,
        len(MODES) + _ATTEMPTS,
        policy.budget,
    )
    search = _Search(model, batch, policy)
    if search.plain <= search.budget:
        return search.choice([of_block[0] for of_block in search.options])
    smallest = min(search.uniform(), key=lambda chosen: (search.needs(chosen), _seconds(chosen)))
    if search.needs(smallest) > search.budget:
        raise ValueError(
            f"Received: budget={policy.budget!r} for a step of model '{model.name}' that needs at least "
            f"{math.ceil(search.needs(smallest) / 1e4) / 100} MB, with the modes that keep the least and a margin of a "
            "tenth. Expected: a budget of that, a smaller batch, more and smaller blocks; or, if weights and slots are "
            "most of it, tfdist.HostOffloadStrategy, which keeps them on the host."
        )
    best, low, high = smallest, peak(smallest), peak([of_block[0] for of_block in search.options])
    limit = min(max(search.budget - search.beside, low), high)
    # `assign` adds up bytes of blocks, which is near what a step needs, but not the same. So its limit is bisected:
    # after each assignment the step is traced and estimated, which shows whether it really fits.
    for _ in range(_ATTEMPTS):
        found = assign(search.options, limit)
        fits = found is not None and search.needs(found) <= search.budget
        if fits and _seconds(found) <= _seconds(best):
            best = found
            if search.needs(best) > _NEAR * search.budget:
                break
        low, high = (limit, high) if fits or found is None else (low, limit)
        limit = (low + high) / 2
    return search.choice(best)


class _Search:
    """What a step needs under several policies; the same one is estimated once."""

    def __init__(self, model: keras.Model, batch: Any, policy: MemoryPolicy):
        self._model, self._batch, self._policy = model, batch, policy
        self.budget = bytes_of_budget(policy.budget)
        with under(model, policy.with_modes("none")):
            plain = estimate(model, batch)
        replicas = {device.device for device in plain.devices if device.batch}
        _check_known(model, plain)
        host = short_device(policy.host)
        with_host = host not in replicas and not model.jit_compile
        self.rates = _agreed(model.distribute_strategy, measured_rates(plain.devices[0].device, policy.host))
        self._costs = block_costs(plain)
        self.options = options(self._costs, self.rates, with_host)
        self.plain = self._with_margin(plain)
        # Bytes that no block keeps: weights, slots, the batch, gradients.
        self.beside = self.plain - sum(cost.kept for cost in self._costs)
        self._needs = {("none",) * len(self.options): self.plain}

    def uniform(self) -> list[list[Option]]:
        """The same mode for all blocks, as far as they have it."""
        modes = {option.mode for of_block in self.options for option in of_block}
        return [
            [next((option for option in of_block if option.mode == mode), of_block[0]) for of_block in self.options]
            for mode in sorted(modes)
        ]

    def needs(self, chosen: Sequence[Option]) -> int:
        """Bytes that a step needs, with the margin."""
        modes = tuple(option.mode for option in chosen)
        if modes not in self._needs:
            with under(self._model, self._policy_of(modes)):
                self._needs[modes] = self._with_margin(estimate(self._model, self._batch))
        return self._needs[modes]

    def choice(self, chosen: Sequence[Option]) -> Choice:
        """The result: a policy with these modes, and why."""
        policy = self._policy_of([option.mode for option in chosen])
        layers = contents_of(self._model, policy)
        return Choice(policy, self.budget, self.plain, self.needs(chosen), self._costs, chosen, self.rates, layers)

    def _policy_of(self, modes: Sequence[str]) -> MemoryPolicy:
        by_block = {glob.escape(cost.name): mode for cost, mode in zip(self._costs, modes, strict=True)}
        return self._policy.with_modes(by_block)

    @staticmethod
    def _with_margin(estimated: Estimate) -> int:
        return max(round(device.total + (MARGIN - 1) * device.step) for device in estimated.devices if device.batch)


def _check_known(model: keras.Model, plain: Estimate) -> None:
    if not plain.traced.forward:
        raise ValueError(
            f"Received: model '{model.name}', whose train step calls none of its blocks. Expected: a step that calls "
            "the model, or blocks=[...] with layers that it calls."
        )
    loops = any(operation.type in ("While", "StatelessWhile") for operation in plain.traced.graph.get_operations())
    for known, what in ((not model.jit_compile, "how XLA orders a step"), (not loops, "what loops keep inside")):
        if not known:
            _log.warning(
                "Model '%s': %s is not estimated, and not in the budget. Measure: tfdist.memory.report(..., "
                "measured=True).",
                model.name,
                what,
            )


def _agreed(strategy: tf.distribute.Strategy, rates: Rates) -> Rates:
    """The slowest of all processes' rates.

    All processes must choose the same: a block that is run again may contain a collective (synchronised statistics),
    in which all processes take part.
    """
    peers = getattr(strategy, "_peers", None)
    if peers is None:
        return rates
    every = peers.gather("rates", list(rates), "choose what the blocks of a model keep")
    return Rates(*map(min, zip(*every, strict=True)))


def _seconds(chosen: Sequence[Option]) -> float:
    return sum(option.seconds for option in chosen)
