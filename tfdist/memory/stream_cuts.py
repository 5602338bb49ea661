"""Where a graph of layers is cut into blocks that are on the device one after the other."""

from __future__ import annotations

import itertools
import math

from tfdist.layer_graph.chunk import uncuttable
from tfdist.layer_graph.costs import costs_of, crossing
from tfdist.layer_graph.graph import LayerGraph

_ROWS = 16
# A block may need so many times what the largest layer needs: small layers go with a large one.
_SLACK = 1.5


def stream_cuts(graph: LayerGraph) -> tuple[int, ...]:
    """Cuts with which no block needs much more than the largest layer does anyway, however many layers there are.

    Of all such cuts these are the ones at which the least has to spend its time on the host.

    Args:
        graph: the calls.

    Returns:
        The position of the first call of each block but the first.

    Raises:
        ValueError: if the calls cannot be parted.

    Example:
        >>> import keras
        >>> from tfdist.layer_graph.graph import flatten
        >>> layers = [keras.Input((9,)), *(keras.layers.Dense(9) for _ in range(4))]
        >>> stream_cuts(flatten(keras.Sequential(layers)._functional))
        (1, 2, 3)
    """
    needs = [cost.parameter_bytes + cost.output_bytes for cost in costs_of(graph, _ROWS)]
    total = [0.0, *itertools.accumulate(needs)]
    forbidden = uncuttable(graph)
    bounds = [place for place in range(len(needs) + 1) if place not in forbidden]
    limit = _SLACK * max((total[b] - total[a] for a, b in itertools.pairwise(bounds)), default=0.0)
    # One more for each cut: of those that park equally much, fewer are better.
    parked = [_ROWS * bytes_of_a_row + 1.0 for bytes_of_a_row in crossing(graph)]
    # For each bound, what is parked before it at the least, and where the block that ends there begins, negated: of
    # those that park equally much, the latest.
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for number, end in enumerate(bounds[1:], 1):
        best[end] = math.inf, 0
        for begin in reversed(bounds[:number]):
            if total[end] - total[begin] > limit:
                break
            cost = best[begin][0] + (parked[begin] if begin else 0.0)
            best[end] = min(best[end], (cost, -begin))
    cuts = []
    place = -best[bounds[-1]][1]
    while place:
        cuts.append(place)
        place = -best[place][1]
    if not cuts:
        raise ValueError(
            "Received: a model that is one block: the device would hold all of it. Expected: a model of several layers "
            "that can be parted, or blocks=[...] with names or classes of layers."
        )
    return tuple(reversed(cuts))
