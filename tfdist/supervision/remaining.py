"""How much of a fit is done, and how much is left, from the place where it is."""

from __future__ import annotations


def fraction_done(epoch: int, epochs: int | None, step: int, steps: int | None) -> float | None:
    """How much of a fit is done, in [0, 1]; None if nobody knows how many epochs there will be.

    Args:
        epoch: from 1.
        epochs: how many there will be.
        step: of this epoch.
        steps: how many an epoch has; None if that is not known yet: then the epochs before are what counts.

    Example:
        >>> fraction_done(2, 4, 5, 10), fraction_done(2, 4, 5, None)
        (0.375, 0.25)
    """
    if not epochs:
        return None
    of_epoch = min(step / steps, 1.0) if steps else 0.0
    return min(max((epoch - 1 + of_epoch) / epochs, 0.0), 1.0)


def steps_left(epoch: int, epochs: int, step: int, steps: int) -> int:
    """How many steps are left to the end of a fit, with the arguments of `fraction_done`.

    Example:
        >>> steps_left(2, 4, 5, 10)
        25
    """
    return max((epochs - epoch + 1) * steps - step, 0)
