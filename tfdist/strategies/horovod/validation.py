"""Checks the arguments of `tfdist.HorovodStrategy`; the same in one process as on many."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import tensorflow as tf

from tfdist.arguments import check_seconds

# Of gradients that are cast; Horovod has no sums of bfloat16.
NARROW = {None: None, "fp16": tf.float16}


def check_arguments(
    compression: Any,
    process_set: Sequence[int] | None,
    **seconds: float,
) -> None:
    """Checks the strategy's own arguments.

    Args:
        compression: see `HorovodStrategy`.
        process_set: see `HorovodStrategy`; which ranks there are is not known yet.
        **seconds: limits of time, by name.

    Raises:
        ValueError: for what cannot be used.

    Example:
        >>> check_arguments(None, [0, 0])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: Received: process_set=[0, 0], in which 0 stands 2 times. Expected: the ranks of the group as a ...
    """
    if compression == "bf16":
        raise ValueError(
            "Received: compression='bf16'. Expected: None, 'fp16', which casts gradients to float16, or a method of "
            "tfdist.compression; Horovod has no sums of bfloat16."
        )
    if process_set is not None:
        _check_ranks(process_set)
    check_seconds(**seconds)


def _check_ranks(process_set: Any) -> None:
    expected = (
        "Expected: the ranks of the group as a list of distinct whole numbers from 0, such as [0, 1], or None for all."
    )
    try:
        ranks = None if isinstance(process_set, (str, bytes)) else list(process_set)
    except TypeError:
        ranks = None
    if not ranks:
        raise ValueError(f"Received: process_set={process_set!r}. {expected}")
    for rank in ranks:
        if not _is_whole(rank) or rank < 0:
            raise ValueError(f"Received: process_set={ranks}, in which {rank!r} is no rank. {expected}")
    twice = next((rank for rank in ranks if ranks.count(rank) > 1), None)
    if twice is not None:
        raise ValueError(
            f"Received: process_set={ranks}, in which {twice} stands {ranks.count(twice)} times. {expected}"
        )


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
