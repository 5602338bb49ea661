"""What a fit with backups tells its user, as warnings and in the log."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from tfdist.compat.hooks import hooks_of
from tfdist.supervision.exit_codes import PREEMPTED, UNSAVED

_log = logging.getLogger("tfdist")


def of_resumption(meta: Mapping[str, Any], checkpoint: str, over: bool, epochs: int) -> None:
    """Says at which step a fit goes on.

    Args:
        meta: of the backup.
        checkpoint: its folder.
        over: whether nothing is left to train.
        epochs: how many the user asks for.
    """
    if not over:
        where = (meta["steps"], meta["epoch"] + 1, meta["total"])
        _log.warning("The fit goes on at step %d of epoch %d, after %d steps in all: %s", *where, checkpoint)
        return
    folder = checkpoint.rpartition("/")[0]
    _log.warning(
        "The fit is finished: %s. To train anew, delete the folder %s or pass another backup_dir.", checkpoint, folder
    )
    if meta["epoch"] > epochs:
        _warn(
            f"Received: epochs={epochs}. The backup is of {meta['epoch']} epochs: the fit returns with all of them. To "
            f"train for fewer, delete the folder {folder} or pass another backup_dir."
        )


def of_other_callbacks(
    callbacks: Sequence[Any], entries: Sequence[Mapping[str, Any] | None], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Warns of callbacks that were not there when the backup was made, and of those that are not there now.

    Args:
        callbacks: those of this fit.
        entries: the saved entry of each of them, or `None`.
        saved: all entries.
    """
    new = [type(callback).__name__ for callback, entry in zip(callbacks, entries, strict=True) if entry is None]
    used = set(map(id, entries))
    gone = [entry["class"] for entry in saved if id(entry) not in used]
    if new or gone:
        begin = f"{', '.join(new)}: not in the backup, and begins as new. " if new else ""
        left = f"{', '.join(gone)}: in the backup, but not in this fit; its state is left out. " if gone else ""
        _warn(f"The backup is of a fit with other callbacks. {begin}{left}All else goes on as it was saved.")


def of_compression(lost: Sequence[str], strategy: Any) -> None:
    """Says that gradients which were not sent yet are lost.

    Args:
        lost: the names of what the backup has of them, and this fit cannot take over.
        strategy: of this fit.
    """
    if not lost:
        return
    if strategy.num_replicas_in_sync == 1:
        why = "it has one replica, which sends nothing"
    elif (compressor := hooks_of(strategy).compressor) is None:
        why = "its strategy has no compression, or one without rests"
    else:
        why = f"its compression is {compressor.method}"
    _warn(
        f"The backup has rests of compressed gradients ({len(lost)} arrays) that this fit cannot take over: {why}. "
        "They are left out; all else goes on as it was saved."
    )


def of_seed(saved: int | None, now: int | None) -> None:
    """Warns if the user has set another seed than that of the saved fit, whose random states come back."""
    if saved is not None and now is not None and saved != now:
        _warn(
            f"Received: keras.utils.set_random_seed({now}). The backup is of a fit with the seed {saved}, and goes on "
            "with that one. To train with another seed, delete its folder or pass another backup_dir."
        )


def of_obstacle(obstacle: str) -> None:
    """Warns that no position within an epoch can be found again."""
    _warn(
        f"BackupAndRestore saves at the ends of epochs only: {obstacle}. After a kill, the epoch that it interrupted "
        "is trained again from its beginning. It and the later ones get the data that the new process gives, which "
        "need not be those of an uninterrupted run."
    )


def of_failed_backup(error: Exception) -> None:
    """Warns that a backup was not written."""
    warnings.warn(
        f"A backup could not be written; training goes on, and the last good one is kept. {error}",
        RuntimeWarning,
        stacklevel=3,
    )


def of_preemption(signal: str, where: str, failure: str | None, kept: str | None) -> str:
    """Says that a fit has stopped since it was asked to, and where it goes on.

    Args:
        signal: the name of the signal.
        where: after what it has stopped, and whether that is saved.
        failure: why a backup that was due could not be written; `None` if it was.
        kept: the last backup, in words; `None` if there is none.

    Example:
        >>> of_preemption("SIGTERM", "after step 3 of epoch 1, which is saved", None, None)
        'SIGTERM: stopped after step 3 of epoch 1, which is saved; exit code 77'
    """
    if failure is None:
        return f"{signal}: stopped {where}; exit code {PREEMPTED}"
    begin = f"goes on from the last backup, {kept}" if kept else "trains from the beginning, since there is no backup"
    return f"{signal}: stopped {where}. {failure} A new start {begin}; exit code {UNSAVED}"


class Unsaved:
    """Warns of callbacks' attributes that are in no backup, once for each callback and attribute."""

    def __init__(self) -> None:
        self._told: set[tuple[int, str]] = set()

    def tell(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Warns of what is new in the states of all callbacks."""
        for number, entry in enumerate(entries):
            names = [name for name in entry["unsaved"] if (number, name) not in self._told]
            self._told.update((number, name) for name in names)
            if names:
                listing = ", ".join(f".{name}" for name in names)
                are = "is" if len(names) == 1 else "are"
                _warn(
                    f"{entry['class']}: {listing} {are} not saved. After a kill the callback goes on without; if that "
                    "matters, give it get_state(), which returns plain data, and set_state(state)."
                )


def _warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=4)
