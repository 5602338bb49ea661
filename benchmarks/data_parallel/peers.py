"""The frameworks that are compared, the trials of each, and the lines of the table."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Sequence

from benchmarks.data_parallel.workload import Workload


@dataclasses.dataclass(frozen=True)
class Peer:
    """One framework.

    Attributes:
        title: what the table calls it.
        worker: module, in this package, that its processes run.
        package: what has to be installed for it.
    """

    title: str
    worker: str
    package: str


PEERS = {
    "tfdist": Peer("tfdist", "keras_worker", "tfdist"),
    "tf_keras": Peer("tf_keras, tf.distribute", "tf_keras_worker", "tf_keras"),
    "torch": Peer("PyTorch DDP (gloo)", "torch_worker", "torch"),
}

# What tfdist is measured with besides its defaults: title of the line and settings of its trials.
VARIANTS: dict[str, tuple[str, dict]] = {
    "spe10": ("tfdist, steps_per_execution=10", {"steps_per_execution": 10}),
    "tensorflow": ("tfdist, --transport tensorflow", {"transport": "tensorflow"}),
    "bf16": ('the same, compression="bf16"', {"transport": "tensorflow", "compression": "bf16"}),
    "horovod": ("tfdist, --transport horovod", {"transport": "horovod"}),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One framework with one workload."""

    peer: str
    workload: Workload


@dataclasses.dataclass(frozen=True)
class Row:
    """A line of the table: the same training in one process and in two."""

    title: str
    one: Trial
    two: Trial


def installed(package: str) -> bool:
    """Whether a package can be imported, found out without importing it."""
    return importlib.util.find_spec(package) is not None


def split_available(peers: Iterable[str], is_there: Callable[[str], bool] = installed) -> tuple[list[str], list[str]]:
    """Returns the peers that can run, and for each of the others the reason why it cannot.

    Example:
        >>> split_available(["tfdist", "torch"], is_there=lambda package: package != "torch")
        (['tfdist'], ['PyTorch DDP (gloo) is left out: torch is not installed. Install it by `pip install torch`.'])
    """
    available, reasons = [], []
    for name in peers:
        peer = PEERS[name]
        if is_there(peer.package):
            available.append(name)
        else:
            reasons.append(
                f"{peer.title} is left out: {peer.package} is not installed. "
                f"Install it by `pip install {peer.package}`."
            )
    return available, reasons


def variants_available(
    variants: Iterable[str], is_there: Callable[[str], bool] = installed
) -> tuple[list[str], list[str]]:
    """Returns the variants that can run, and for each of the others the reason why it cannot.

    Example:
        >>> variants_available(["bf16", "horovod"], is_there=lambda package: False)[0]
        ['bf16']
    """
    variants = list(variants)
    left_out = [v for v in variants if VARIANTS[v][1].get("transport") == "horovod" and not is_there("horovod")]
    reasons = [f"{VARIANTS[v][0]} is left out: Horovod is not installed. See docs/horovod.md." for v in left_out]
    return [variant for variant in variants if variant not in left_out], reasons


def make_rows(peers: Sequence[str], variants: Sequence[str], workload: Workload) -> list[Row]:
    """The lines of one model.

    Args:
        peers: keys of `PEERS`.
        variants: keys of `VARIANTS`, measured if tfdist is among the peers.
        workload: that of one process, with default settings.
    """
    rows = []
    for name in peers:
        own_variants = [VARIANTS[variant] for variant in variants] if name == "tfdist" else []
        for title, settings in [(PEERS[name].title, {}), *own_variants]:
            two = dataclasses.replace(workload, processes=2, **settings)
            # One process does not communicate: its trial is that of the default settings, and measured once.
            rows.append(Row(title, Trial(name, two.in_one_process()), Trial(name, two)))
    return rows


def in_turns(rows: Sequence[Row], rounds: int) -> Iterator[tuple[int, Trial]]:
    """All trials, each once a round: a machine that becomes slower does so for everybody."""
    trials = list(dict.fromkeys(trial for row in rows for trial in (row.one, row.two)))
    for number in range(rounds):
        for trial in trials:
            yield number, trial
