"""A click log that is made up, so that nothing is downloaded and the best possible result is known.

Like a real one, it has many ids and few that are frequent: users and items follow Zipf's law. Every user and every item
has a vector of tastes, some items please everybody, and people click more in the evening. Together they give
the probability of a click, with which each click is drawn at random. A model that knew the probabilities would still
be wrong about single clicks; its AUC, `Log.best_auc`, is the best possible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

HOURS = 24
_TASTES = 4
_SPREAD = 1.4
_MEAN = -1.5


@dataclass(frozen=True)
class Log:
    """What was shown to whom and when, and whether it was clicked on. All arrays have one row for each showing.

    Attributes:
        features: ids of "user", "item" and "hour" (int32).
        clicks: 0 or 1 (float32).
        probabilities: of a click (float32); no model may see them.
    """

    features: dict[str, np.ndarray]
    clicks: np.ndarray
    probabilities: np.ndarray

    @property
    def best_auc(self) -> float:
        """The AUC of a model that knows the probabilities."""
        return auc(self.clicks, self.probabilities)

    def rows(self, part: slice) -> Log:
        """Some of the rows.

        Example:
            >>> len(make(1000, users=50, items=20).rows(slice(100)).clicks)
            100
        """
        features = {name: values[part] for name, values in self.features.items()}
        return Log(features, self.clicks[part], self.probabilities[part])


def make(rows: int, users: int, items: int, seed: int = 1) -> Log:
    """A log; the same arguments give the same one.

    Args:
        rows: its length.
        users: how many there are.
        items: how many there are.
        seed: of the random numbers.

    Example:
        >>> log = make(10_000, users=500, items=100)
        >>> bool(0.2 < log.clicks.mean() < 0.4), 0.75 < log.best_auc < 0.9
        (True, True)
    """
    generator = np.random.default_rng(seed)
    user_tastes, item_tastes = (generator.normal(size=(count, _TASTES)) for count in (users, items))
    popularity = generator.normal(0.0, 0.8, size=items)
    user, item = _zipf(generator, users, rows, 0.9), _zipf(generator, items, rows, 1.0)
    hour = generator.integers(0, HOURS, rows)
    logits = _MEAN + popularity[item] + 0.5 * np.sin((hour - 13) * 2 * np.pi / HOURS)
    logits += _SPREAD / np.sqrt(_TASTES) * np.einsum("ij,ij->i", user_tastes[user], item_tastes[item])
    probabilities = 1 / (1 + np.exp(-logits))
    clicks = generator.random(rows) < probabilities
    features = {"user": user, "item": item, "hour": hour}
    return Log(
        {name: values.astype(np.int32) for name, values in features.items()},
        clicks.astype(np.float32),
        probabilities.astype(np.float32),
    )


def auc(clicks: np.ndarray, scores: np.ndarray) -> float:
    """How often something that was clicked on has a higher score than something that was not; ties count half.

    Example:
        >>> auc(np.array([0, 1, 0, 1]), np.array([0.1, 0.9, 0.5, 0.5]))
        0.875
    """
    _, group, sizes = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[group]
    clicked = clicks > 0
    positive, negative = int(clicked.sum()), int((~clicked).sum())
    return float((ranks[clicked].sum() - positive * (positive + 1) / 2) / (positive * negative))


def _zipf(generator: np.random.Generator, count: int, rows: int, exponent: float) -> np.ndarray:
    """Ids of which the k-th most frequent one is about 1 / k ** exponent times as frequent as the first one."""
    weights = np.cumsum(1 / np.arange(1, count + 1) ** exponent)
    ranks = np.searchsorted(weights, generator.random(rows) * weights[-1], side="right")
    # A real id does not tell how frequent it is.
    return generator.permutation(count)[ranks]
