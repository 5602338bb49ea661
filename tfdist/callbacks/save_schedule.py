"""When to save: `save_freq` in its three forms."""

from __future__ import annotations

import re
import time

_UNITS = {"s": 1.0, "sec": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")


class SaveSchedule:
    """Decides whether a save is due.

    Args:
        save_freq: `"epoch"`, a number of steps, or a duration such as `"10min"`, `"30s"` or `"1.5h"`.

    Attributes:
        every_steps: the number of steps; `None` for the other forms.
        every_seconds: the duration in seconds; `None` for the other forms.

    Raises:
        ValueError: for anything else.

    Example:
        >>> SaveSchedule(100).every_steps, SaveSchedule("10min").every_seconds, SaveSchedule("epoch").every_epoch
        (100, 600.0, True)
    """

    def __init__(self, save_freq: str | int):
        self.every_epoch = save_freq == "epoch"
        self.every_steps: int | None = None
        self.every_seconds: float | None = None
        if isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq > 0:
            self.every_steps = save_freq
        elif isinstance(save_freq, str) and (match := _DURATION.fullmatch(save_freq)) and match[2] in _UNITS:
            self.every_seconds = float(match[1]) * _UNITS[match[2]]
        elif not self.every_epoch:
            raise ValueError(
                f"Received: save_freq={save_freq!r}. Expected 'epoch', a number of steps from 1, or a duration such as "
                "'10min', '30s' or '2h'."
            )
        self.saved(0)

    def saved(self, step: int) -> None:
        """Notes a save after `step` training steps, or that training begins there."""
        self._step = step
        self._time = time.monotonic()

    def due_after_step(self, step: int) -> bool:
        """Whether `every_steps` asks for a save after `step` training steps: the same on every process."""
        return self.every_steps is not None and step - self._step >= self.every_steps

    @property
    def due_by_time(self) -> bool:
        """Whether `every_seconds` asks for a save now: processes that have to agree need another way to do so."""
        return self.every_seconds is not None and time.monotonic() - self._time >= self.every_seconds
