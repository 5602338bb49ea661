"""What is measured: models, and the ways in which each of them is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

WORKERS = (1, 2)
STEPS_PER_EXECUTION = (1, 8, 32)
MAX_INFLIGHT = (1, 2, 4, 8, 16, 32)
ROWS = (200_000, 2_000_000)
PEERS = {"plain": "Keras 3, one process", "tfdist": "tfdist", "tf_keras": "tf_keras, tf.distribute"}

_OPTIMIZERS = {"sgd": "SGD", "adagrad": "Adagrad", "lazy_adam": "LazyAdam", "adam": "Adam"}
_TITLES = {
    "dense": "Dense 64-64-1 on 32 features, batch 32",
    "wide": "Dense 1024-1024-1 on 32 features, batch 32",
    "sleep": "A step that sleeps for 40 ms on its worker",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        model: "dense", "wide", "sleep" or "embedding".
        optimizer: "sgd", "adagrad", "adam" or "lazy_adam".
        rows: of the embedding.
    """

    model: str
    optimizer: str = "sgd"
    rows: int = 0

    @property
    def title(self) -> str:
        """The headline of its table."""
        if self.model == "embedding":
            return f"Embedding {self.rows:,} x 32, {_OPTIMIZERS[self.optimizer]}, batch 1024 of 4 ids"
        return _TITLES[self.model]


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way to train a case: a line of its table.

    Attributes:
        case: what is trained.
        peer: key of `PEERS`.
        workers: how many; 0 for one process without a strategy.
        steps_per_execution: steps that Keras hands out in one call.
        mode: of `tfdist.ParameterServerStrategy`.
        max_inflight: of `tfdist.ParameterServerStrategy`; `None` for its default.
        worker_input: whether the workers read the data. The stock strategy knows nothing else.
    """

    case: Case
    peer: str
    workers: int = 0
    steps_per_execution: int = 1
    mode: str = "async"
    max_inflight: int | None = None
    worker_input: bool = False

    @property
    def cluster(self) -> tuple[str, int]:
        """The processes in which it runs: peer and number of workers."""
        return self.peer, self.workers

    @property
    def title(self) -> str:
        """Framework and options.

        Example:
            >>> Trial(Case("dense"), "tfdist", 2, mode="sync").title
            'tfdist, mode="sync"'
        """
        parts = [PEERS[self.peer]]
        parts += [f"steps_per_execution={self.steps_per_execution}"] if self.steps_per_execution > 1 else []
        parts += ['mode="sync"'] if self.mode == "sync" else []
        parts += [f"max_inflight={self.max_inflight}"] if self.max_inflight else []
        parts += ["worker_input=True"] if self.worker_input and self.peer == "tfdist" else []
        return ", ".join(parts)

    def to_dict(self) -> dict:
        """The plain values that `from_dict` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> Trial:
        """The trial that `to_dict` has described.

        Example:
            >>> Trial.from_dict(Trial(Case("wide"), "plain").to_dict()).case.model
            'wide'
        """
        return cls(**{**values, "case": Case(**values["case"])})


def _speeds(case: Case) -> list[Trial]:
    trials = [Trial(case, "plain", steps_per_execution=steps) for steps in STEPS_PER_EXECUTION]
    for workers in WORKERS:
        for steps in STEPS_PER_EXECUTION:
            trials.append(Trial(case, "tfdist", workers, steps))
            trials.append(Trial(case, "tfdist", workers, steps, worker_input=True))
            trials.append(Trial(case, "tf_keras", workers, steps, worker_input=True))
        trials.append(Trial(case, "tfdist", workers, mode="sync"))
    return trials


def _inflight(case: Case) -> list[Trial]:
    trials = [Trial(case, "plain")]
    for workers in WORKERS:
        trials += [Trial(case, "tfdist", workers, max_inflight=count) for count in MAX_INFLIGHT]
        trials.append(Trial(case, "tf_keras", workers, worker_input=True))
    return trials


def _sleep() -> list[Trial]:
    case = Case("sleep")
    trials = _inflight(case)
    for workers in WORKERS:
        trials += [
            Trial(case, "tfdist", workers, worker_input=True),
            Trial(case, "tfdist", workers, mode="sync"),
            Trial(case, "tfdist", workers, steps_per_execution=8),
        ]
    return [*trials, Trial(case, "plain", steps_per_execution=8)]


def _embedding() -> list[Trial]:
    cases = [Case("embedding", optimizer, rows) for rows in ROWS for optimizer in ("sgd", "adagrad", "lazy_adam")]
    trials = []
    for case in [*cases, Case("embedding", "adam", ROWS[0])]:
        trials.append(Trial(case, "plain"))
        for workers in WORKERS:
            trials.append(Trial(case, "tfdist", workers))
            trials.append(Trial(case, "tfdist", workers, worker_input=True))
            if case.optimizer != "lazy_adam":  # tfdist's own
                trials.append(Trial(case, "tf_keras", workers, worker_input=True))
    return trials


# By name: the title, and what makes the trials.
PARTS = {
    "dense": ("A small model", lambda: _speeds(Case("dense"))),
    "wide": ("A larger model", lambda: _speeds(Case("wide"))),
    "sleep": ("Steps that overlap", _sleep),
    "inflight": ("Steps in flight", lambda: _inflight(Case("dense"))),
    "embedding": ("Rows of a table", _embedding),
}


def trials_of(part: str, peers: Collection[str], quick: bool = False) -> list[Trial]:
    """The trials of a part, those of a table one after the other.

    Args:
        part: key of `PARTS`.
        peers: which can be measured.
        quick: leave out most of them, but no kind.
    """
    trials = [trial for trial in PARTS[part][1]() if trial.peer in peers]
    return [trial for trial in trials if _is_quick(trial)] if quick else trials


def _is_quick(trial: Trial) -> bool:
    return (
        trial.workers in (0, WORKERS[-1])
        and trial.steps_per_execution in STEPS_PER_EXECUTION[:2]
        and trial.max_inflight in (None, 1, 4)
        and trial.case.rows in (0, ROWS[0])
    )


def by_case(trials: Sequence[Trial]) -> list[list[Trial]]:
    """The trials of each case."""
    cases = dict.fromkeys(trial.case for trial in trials)
    return [[trial for trial in trials if trial.case == case] for case in cases]
