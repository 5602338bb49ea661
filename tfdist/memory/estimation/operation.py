"""One operation of a graph, as far as it matters for memory."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a graph.

    Attributes:
        device: where it runs.
        inputs: the tensors that it reads, by number.
        outputs: the tensors that it makes, by number.
        sizes: of the outputs, in bytes.
        waits: positions of the operations that it waits for besides.
        is_view: whether its outputs are its first input, seen otherwise.
        is_in_place: whether an output may take the place of an input that nobody else needs.
        inside: bytes that it needs while it runs, besides.
        label: of what it makes.
        name: its name in the graph.
    """

    device: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    sizes: tuple[int, ...]
    waits: tuple[int, ...] = ()
    is_view: bool = False
    is_in_place: bool = False
    inside: int = 0
    label: str = ""
    name: str = ""
