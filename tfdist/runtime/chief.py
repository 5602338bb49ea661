"""What the chief alone does for its job: it writes the files that all save, and runs the callbacks that only report.

`ChiefIO` is asked where the program saves a model:

chief      announces a path, writes it, announces that it is done
the others do not write a path that the chief announces, and go on once it is written: who loads it next
           finds it complete. A path that the chief does not announce is this process' own (some scripts save under
           a name that contains the rank), and is written, with a warning: at once if the chief has saved another
           path in the same lines of the program, or has ended.

`ChiefOnly` holds the place of a callback until a fit begins and it is known which process is the chief. Then it is
replaced: on the chief by the callbacks that it stands for (they see the model, are part of a backup, may stop the
fit), elsewhere by nothing.

`let_chief_write` is for the callbacks of Keras: a `ModelCheckpoint` runs on all processes, and the chief saves.
`SyncCallback` comes last. Remote paths are tried before a fit begins (`check_paths`): they are first written hours
later.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist.arguments import is_new
from tfdist.compat.keras import hooks_of
from tfdist.compat.scopes import outside_of_scope
from tfdist.compat.upstream import ask_to_proceed_with_overwrite
from tfdist.runtime.peers import Peers, PeerTimeoutError, ProcessLeftError
from tfdist.storage.base import check_writable
from tfdist.storage.selection import advice_for, check_remote_path, is_tensorflows, may_be_remote, storage_of

_log = logging.getLogger("tfdist")

# How long the chief may stay silent before this process takes a path for its own: short if the chief has saved
# something else in the meantime (under its own name, it seems), long if it has saved nothing yet.
_SILENCE_AFTER_OTHER_PATH = 5.0
_SILENCE = 60.0


class ChiefIO:
    """The files that a multi-worker job saves.

    Args:
        peers: the processes of the job.
    """

    def __init__(self, peers: Peers):
        self._peers = peers
        self._saving = False
        self._heard = 0
        self._announced: list[list[str]] = []  # paths, and the lines that have saved them
        # Before it overwrites a file of its own.
        self._asks = False

    def save(self, path: Any, write: Callable[[], Any]) -> Any:
        """Calls `write()` on the process that has to write `path`; returns its result there, `None` elsewhere."""
        if self._saving or not isinstance(path, (str, os.PathLike)):
            return write()
        with self.quietly():
            if self._peers.rank == 0:
                return self._announce(os.fspath(path), write)
            if self._written_by_chief(os.fspath(path)):
                return None
            may_write = not (self._asks and os.path.exists(path)) or ask_to_proceed_with_overwrite(path)
            return write() if may_write else None

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        """While the block runs, this process writes what it saves, and nobody hears of it."""
        before, self._saving = self._saving, True
        try:
            with outside_of_scope():
                yield
        finally:
            self._saving = before

    def save_or_ask(self, path: Any, save: Callable[[bool], Any]) -> None:
        """Calls `save(overwrite)`; with False on the chief, which asks the user whether to overwrite a file.

        The others may find the file that the chief has just written. They ask if they write a path of their own.
        """
        if self._peers.rank == 0:
            self.save(path, lambda: save(False))  # announced before it asks: the others wait for the answer
            return
        self._asks = True
        try:
            save(True)
        finally:
            self._asks = False

    def catch_up(self, purpose: str) -> None:
        """Waits until all processes are here, and marks all that the chief has announced as heard.

        Callbacks of the chief announce files that the other processes never save. These announcements must not be
        taken for later ones.
        """
        announced = self._peers.gather("files", self._heard, purpose)[0]
        # After the fit the chief's program may end at once, and with it what keeps the messages.
        self._peers.acknowledge("files-heard", purpose)
        self._heard = announced
        self._announced.clear()

    @property
    def someone_may_ask(self) -> bool:
        """Whether this is the chief, and another process may still have to hear what it has announced."""
        return self._peers.rank == 0 and bool(self._announced)

    def _announce(self, path: str, write: Callable[[], Any]) -> Any:
        self._heard += 1
        self._announced.append([path, _lines()])
        self._peers.tell(f"save/{self._heard}/path", self._announced[-1])
        try:
            return write()
        finally:
            self._peers.tell(f"save/{self._heard}/done", True)

    def _written_by_chief(self, path: str) -> bool:
        lines = _lines()
        while True:
            for known in self._announced:
                if known[0] == path:
                    self._announced.remove(known)
                    return True
            for known in self._announced:
                if known[1] == lines:
                    return self._is_own(path, known)
            silence = _SILENCE_AFTER_OTHER_PATH if self._announced else _SILENCE
            try:
                announced = self._peers.hear(f"save/{self._heard + 1}/path", 0, f"save {path}", within=silence)
            except (PeerTimeoutError, ProcessLeftError):
                return self._is_own(path, self._announced[0] if self._announced else None)
            self._heard += 1
            self._announced.append(announced)
            if announced[0] == path or announced[1] != lines:
                self._peers.hear(f"save/{self._heard}/done", 0, f"finish saving {announced[0]}")

    def _is_own(self, path: str, of_chief: list[str] | None) -> bool:
        """Says once that the chief does not write a path; the answer of `_written_by_chief`."""
        if of_chief is not None:
            self._announced.remove(of_chief)
        if is_new(self, "own path"):
            _log.warning(
                "Received: %s to save, while the chief saves %s. This process writes it. Expected: the same path on "
                "all processes: the chief alone writes it then, and all can load it.",
                path,
                of_chief[0] if of_chief is not None else "nothing",
            )
        return False


def _lines() -> str:
    """The lines of the user's program that are being called: the same on all processes that do the same."""
    lines, frame = [], sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("tfdist", "keras", "tensorflow"):
            lines.append(f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        frame = frame.f_back
    return " ".join(lines)


_WRITERS = ("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint")
_CHANGE_THE_TRAINING = (
    *("BackupAndRestore", "EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau"),
    *("SwapEMAWeights", "TerminateOnNaN"),
)
_EXPECTED = "Expected: a callback of Keras, or a function without arguments that returns one or a list of them"


class Arranged(keras.callbacks.Callback):
    """A callback that needs a certain place among the others of a fit."""

    def _arrange(self, callback_list: Any, callbacks: list[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
        """The callbacks of a fit in their order. tfdist calls it when Keras makes its list of them.

        Args:
            callback_list: Keras' list.
            callbacks: the callbacks in it, this one among them.
        """
        return callbacks


def is_on_every_process(callback: Any) -> bool:
    """Whether a callback runs on all processes because it needs their help; it lets only the chief write by itself."""
    return getattr(callback, "_on_every_process", False)


def is_the_chiefs(callback: Any) -> bool:
    """Whether a callback runs on the chief only, since it does nothing but write."""
    return _is_one_of(callback, _WRITERS) and not is_on_every_process(callback)


def _is_one_of(callback: Any, names: tuple[str, ...]) -> bool:
    """Whether a callback is one of Keras' classes; not every release has them all."""
    return isinstance(
        callback, tuple(getattr(keras.callbacks, name) for name in names if hasattr(keras.callbacks, name))
    )


class ChiefOnly(Arranged):
    """What `tfdist.callbacks.on_chief` returns.

    Args:
        given: a callback, or what makes one or a list of them.

    Raises:
        ValueError: if it is neither, or a callback that has to run on all processes.
    """

    def __init__(self, given: Any):
        super().__init__()
        self._made: list[keras.callbacks.Callback] | None = None
        if isinstance(given, keras.callbacks.Callback):
            self._made = [_checked(given)]
        elif not callable(given):
            raise ValueError(f"Received: on_chief({given!r}). {_EXPECTED}, such as on_chief(lambda: MyLogger(1)).")
        self._make = given

    def made(self) -> list[keras.callbacks.Callback]:
        """The callbacks, which are made when this is called for the first time."""
        if self._made is None:
            made = self._make()
            if not (isinstance(made, (list, tuple)) and all(isinstance(one, keras.callbacks.Callback) for one in made)):
                made = [made]
            self._made = [_checked(one) for one in made]
        return self._made


def replaced(callback_list: Any, callbacks: list, is_chief: bool) -> list:
    """The callbacks of a fit, with what is the chief's on the chief only.

    Args:
        callback_list: Keras' list.
        callbacks: those in it.
        is_chief: whether this process reports for all.
    """
    found: list[Any] = []
    for callback in callbacks:
        found += [callback] if not isinstance(callback, ChiefOnly) else callback.made() if is_chief else []
    if found != callbacks:
        # Keras calls batch hooks in a thread of its own, unless a callback that the user has given has any.
        own = (callback_list._history, callback_list._progbar)
        callback_list._configure_async_dispatch([callback for callback in found if callback not in own])
    return found


def _checked(callback: Any) -> keras.callbacks.Callback:
    name = type(callback).__name__
    if not isinstance(callback, keras.callbacks.Callback):
        raise ValueError(f"Received: a function for on_chief that returned {callback!r}. {_EXPECTED}.")
    if isinstance(callback, Arranged) or _is_one_of(callback, _CHANGE_THE_TRAINING) or is_on_every_process(callback):
        raise ValueError(
            f"Received: on_chief({name}). Expected: a callback that only reports, such as a logger. {name} changes the "
            f"training, or needs all processes, so that these would part: pass it to fit as it is, on every process."
        )
    return callback


# These do other things, too; only what writes is silenced.
_SAVERS = (keras.callbacks.ModelCheckpoint, keras.callbacks.BackupAndRestore)


def let_chief_write(
    callbacks: list, is_chief: bool, collected: Callable[[Any], Any]
) -> tuple[list[keras.callbacks.Callback], SyncCallback]:
    """Lets the callbacks of a fit write on the chief only, for the time of the fit.

    Callbacks that only write are left out elsewhere. `ModelCheckpoint` and `BackupAndRestore` do other things, too:
    they run on all processes, and save on the chief. So do loggers of the program's own classes that ask the model.

    Args:
        callbacks: those of the fit on this process of several.
        is_chief: whether this process writes.
        collected: a context, made of the model, that all processes enter where one of Keras' callbacks saves it; within
            it the chief can.

    Returns:
        The callbacks that are left, and one that has to come last.
    """
    files = _files_of(callbacks)
    callbacks, restore = (callbacks, contextlib.ExitStack()) if is_chief else without_files(callbacks)
    for callback in callbacks:
        _change(callback, restore, _changes(callback, is_chief, collected))
    return callbacks, SyncCallback(restore, list(filter(is_on_every_process, callbacks)), files)


def without_files(callbacks: list) -> tuple[list[keras.callbacks.Callback], contextlib.ExitStack]:
    """The callbacks of a fit on a process that does not write: without those that do nothing else.

    Returns:
        Those that are left, and what puts back how they have written.
    """
    restore = contextlib.ExitStack()
    callbacks = [callback for callback in callbacks if not is_the_chiefs(callback) or _asks_model(callback)]
    for callback in filter(is_the_chiefs, callbacks):
        is_file = isinstance(callback, keras.callbacks.CSVLogger)
        _change(callback, restore, {"filename": os.devnull, "append": False} if is_file else _NO_EVENTS)
    return callbacks, restore


def _change(callback: keras.callbacks.Callback, restore: contextlib.ExitStack, attributes: dict[str, Any]) -> None:
    for name, value in attributes.items():
        restore.callback(setattr, callback, name, getattr(callback, name, None))
        setattr(callback, name, value)


def _changes(callback: keras.callbacks.Callback, is_chief: bool, collected: Callable[[Any], Any]) -> dict[str, Any]:
    """The attributes that a callback gets for a fit on several processes."""
    if isinstance(callback, _SAVERS):
        save = functools.partial(_save_together, callback, is_chief, collected)
        return {"_save_model": save} if is_chief else {"_save_model": save, "delete_checkpoint": False}
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        # Until the end of an epoch each process sees its own loss, and nobody waits there for one that stops alone.
        # The class's own: what an interrupted fit has left is no method of it.
        stop = type(callback).on_batch_end.__get__(callback)
        return {"on_batch_end": _do_nothing, "on_epoch_end": stop}
    return {}


class _NoSummaries:
    """`tf.summary`, which writes no files."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tf.summary, name)

    def create_file_writer(self, *_: Any, **__: Any) -> Any:
        return tf.summary.create_noop_writer()


# Of a TensorBoard that writes nothing.
_NO_EVENTS = {"_summary_module": _NoSummaries(), "_should_trace": False, "embeddings_freq": 0}
# What needs all processes, or would change the model on one.
_OF_ALL = {
    *("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"),
    *("learning_rate", "assign", "set_weights"),
}


def _asks_model(callback: keras.callbacks.Callback) -> bool:
    """Whether a program's own class of logger uses that in its methods: it logs images, say, or the learning rate."""
    own = [kind for kind in type(callback).__mro__ if not kind.__module__.startswith("keras.")]
    codes = [getattr(value, "__code__", None) for kind in own for value in vars(kind).values()]
    asks = any(_OF_ALL.intersection(code.co_names) for code in codes if code)
    return asks and isinstance(callback, (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard))


def _save_together(
    callback: keras.callbacks.Callback, is_chief: bool, collected: Callable[[Any], Any], *args: Any, **kwargs: Any
) -> None:
    """In place of `_save_model`, which is called on all processes after the same step.

    Whether the chief saves then, and under which name, may depend on what only its own batches tell.
    """
    with collected(callback.model):
        if is_chief:
            # The others wait at the end of the fit. What is announced they would take for a later file of that path,
            # after a fit that was interrupted.
            with callback.model.distribute_strategy._chief_io.quietly():
                type(callback)._save_model(callback, *args, **kwargs)
        elif kwargs.get("batch", 0) is None:
            # Programs read `best` of a ModelCheckpoint. The logs of an epoch are the same on all, and so is the answer.
            verbose, callback.verbose = callback.verbose, 0
            callback._should_save_model(filepath="", **kwargs)
            callback.verbose = verbose


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces methods of callbacks that must not run on this process."""


class SyncCallback(keras.callbacks.Callback):
    """Comes last on every process: all begin at the same point, and find all files written when `fit` returns.

    Args:
        restore: undoes what was changed on the other callbacks for the time of the fit.
        helpers: callbacks that need the other processes to have them, too; they are told whether these do.
        files: what this process' callbacks would write; only the chief's do.
    """

    comes_last = True

    def __init__(self, restore: contextlib.ExitStack, helpers: Sequence[Any] = (), files: Sequence[str] = ()):
        super().__init__()
        self._restore = restore
        self._helpers = helpers
        self._files = list(files)

    def on_train_begin(self, logs: dict | None = None) -> None:
        """Raises ValueError on every process if callbacks have restored different states."""
        hooks, optimizer = hooks_of(self.model.distribute_strategy), self.model.optimizer
        peers, own = hooks.peers, {"epoch": self.model._initial_epoch or 0}
        if not hooks.keeps_own:  # a worker may have skipped some
            own["optimizer step"] = int(optimizer.iterations.numpy()) if optimizer is not None else 0
        helpers = [type(callback).__name__ for callback in self._helpers]
        told = peers.gather("begin", [own, helpers, self._files], "begin to train")
        everyone = [state for state, *_ in told]
        if peers.rank == 0:
            self._warn_of_other_files(peers.names, [files for *_, files in told])
        for callback in self._helpers:
            callback._joined(all(theirs == helpers for _, theirs, _ in told))
        if any(state != own for state in everyone):
            listing = "; ".join(f"{name}: {state}" for name, state in zip(peers.names, everyone, strict=True))
            raise ValueError(
                f"The processes would begin to train at different points. Received: {listing}. Expected: the same on "
                "all. A backup folder or a checkpoint must be on a file system that all of them share."
            )

    def _warn_of_other_files(self, names: Sequence[str], files: Sequence[list[str]]) -> None:
        """On the chief, whose output is what people read."""
        for name, theirs in zip(names, files, strict=True):
            if others := [file for file in theirs if file not in self._files]:
                warnings.warn(
                    f"Received: {', '.join(others)}, on {name}, which does not write it: the chief alone does, and has "
                    f"{', '.join(self._files) or 'none'}. Expected: the same callbacks and paths on all processes.",
                    stacklevel=2,
                )
                return

    def on_train_end(self, logs: dict | None = None) -> None:
        self.model.distribute_strategy._chief_io.catch_up("finish its callbacks at the end of fit")
        self._restore.close()


def _files_of(callbacks: Sequence[keras.callbacks.Callback]) -> list[str]:
    """What callbacks write: the class of each, and its path. Folders of TensorBoard often contain the time."""
    backups = [
        f"BackupAndRestore of {callback.backup_dir}" for callback in callbacks if hasattr(callback, "backup_dir")
    ]
    return [*backups, *(f"{kind} of {path}" for kind, _, path in paths_of(callbacks) if kind != "TensorBoard")]


_PATHS = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}


def check_paths(callbacks: list[keras.callbacks.Callback], is_chief: bool) -> None:
    """Refuses remote paths that nothing can write to, on every process: none then waits for the others.

    Args:
        callbacks: those of a fit.
        is_chief: whether this process writes: it tries the paths.

    Raises:
        ImportError: if the package for the scheme of a path is not installed.
        OSError: if a path cannot be written.
        ValueError: if a path is none that its callback can write to.
    """
    folders: dict[str, str] = {}
    for kind, attribute, path in paths_of(callbacks):
        if not may_be_remote(path):
            continue
        check_remote_path(f"{kind}'s {attribute}", path)
        if kind == "CSVLogger" or (kind == "TensorBoard" and not is_tensorflows(path)):
            raise ValueError(
                f"Received: {kind}({attribute}={path!r}). Expected: a local path, or for TensorBoard one that "
                "TensorFlow opens by itself (gs://). Let it write to a local path, and copy that when the training has "
                "ended."
            )
        folders.setdefault(_folder_of(path), f"{kind}({attribute}={path!r})")
    for folder, received in folders.items() if is_chief else ():
        try:
            _try(folder)
        except OSError as error:
            text = f"Received: {received}, but {error}. Expected: a place to write to. {advice_for(folder)}"
            raise OSError(text) from error


@functools.cache
def _try(folder: str) -> None:
    """Once in a process: evaluate and predict have callbacks, too."""
    check_writable(storage_of(folder), folder)


def paths_of(callbacks: Iterable[Any]) -> Iterator[tuple[str, str, str]]:
    """For each path that callbacks write to: which of Keras' classes it is of, the attribute, and the path."""
    for callback in callbacks:
        for kind, attribute in _PATHS.items():
            path = getattr(callback, attribute, None)
            if isinstance(callback, getattr(keras.callbacks, kind)) and isinstance(path, (str, os.PathLike)):
                yield kind, attribute, os.fspath(path)


def _folder_of(path: str) -> str:
    """The folder of a path, as far as it has no places for numbers that are not known yet.

    Example:
        >>> _folder_of("gs://bucket/run/epoch-{epoch:02d}/best.keras")
        'gs://bucket/run'
        >>> _folder_of("gs://bucket/logs")
        'gs://bucket'
    """
    fixed = path.partition("{")[0]
    folder = fixed.rpartition("/")[0]
    return fixed if folder.endswith(":/") else folder
