"""A function on its way to new processes, and what it returned on its way back: the files that child.py works with."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import io
import linecache
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO

import cloudpickle

from tfdist.atomic_files import write_atomically

# Started by its path: it finds the parent's modules only after it has read where the parent found them.
CHILD = str(Path(__file__).with_name("child.py"))
# Printed by a process in front of the traceback of an exception that its caller is about to show.
RAISED = "--- the function raised:"

_ADVICE = (
    "Return plain values or NumPy arrays, such as history.history; or save the model and return its path. Custom "
    "classes need @keras.saving.register_keras_serializable()"
)


class LaunchError(RuntimeError):
    """A function could not be run in new processes, or did not return in all of them; the message says where and why.

    Attributes:
        ranks: ranks that failed, first the one that is to blame. With parameter servers: positions in the order
            chief, workers, parameter servers. Empty where no process was started.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = tuple(ranks)


@dataclass(frozen=True)
class Outcome:
    """How a call ended in one process.

    Attributes:
        moment: when, in seconds since 1970.
        succeeded: whether the function returned.
        value: what it returned, or the exception that it raised.
        traceback: of the exception, as Python prints it, without what is above the function.
    """

    moment: float
    succeeded: bool
    value: Any
    traceback: str = ""

    @property
    def text(self) -> str:
        """The last line of the traceback: the exception and what it says."""
        return "".join(traceback.format_exception_only(self.value)).strip()


class CallPickler(cloudpickle.Pickler):
    """Pickles functions by value, with the names of their files, and a History without its model.

    cloudpickle leaves the files out; but tracebacks quote from them, and tf.function reads them. Whoever asks for the
    numbers of a History wants no second model, which would take its place on the GPUs, and custom classes could not be
    read.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            _, parts = self.dispatch_table[CodeType](obj)
            return _code, (obj.co_filename, *parts)
        keras = sys.modules.get("keras")
        if keras is not None and isinstance(obj, keras.callbacks.History):
            return copyreg.__newobj__, (type(obj),), {**vars(obj), "_model": None}
        return super().reducer_override(obj)


_BUILD = "Build it in the function, in the scope of the strategy; weights travel as arrays (model.get_weights())"
# Classes of objects that must not travel, what they are called, and what to do instead.
_STAYING = (
    ("tensorflow", "distribute.Strategy", "strategy", "Make it in the function, where it finds the worker's cluster"),
    ("tensorflow", "data.Dataset", "dataset", "Make it in the function, from arrays or files"),
    ("tensorflow", "Variable", "variable", "Make it in the function, and give it the value of x.numpy()"),
    ("tensorflow", "Tensor", "tensor", "Give the function x.numpy() instead"),
    ("keras", "Layer", "model or layer", _BUILD),
    ("keras", "Optimizer", "optimizer", _BUILD),
    ("keras", "Metric", "metric", _BUILD),
    ("keras", "Variable", "variable", _BUILD),
)


class SendingPickler(CallPickler):
    """Pickles functions by value; refuses what would start TensorFlow in a worker before its strategy does.

    Example:
        >>> SendingPickler(io.BytesIO()).dump(lambda: 1)
    """

    def reducer_override(self, obj: Any) -> Any:
        for module, kind, what, advice in _STAYING:
            if module in sys.modules and isinstance(obj, attrgetter(kind)(sys.modules[module])):
                raise TypeError(f"a {what} ({type(obj).__name__}) belongs to this process and its devices. {advice}.")
        return super().reducer_override(obj)


def describe(fn: Callable[..., Any], args: Sequence[Any], error: Exception) -> str:
    """Says which name of the user's stands for what could not be pickled, and why.

    Args:
        fn: a function.
        args: its arguments.
        error: what pickling them has raised.

    Example:
        >>> import threading
        >>> lock = threading.Lock()
        >>> def function():
        ...     return lock
        >>> describe(function, (), TypeError("cannot pickle '_thread.lock' object"))
        "`lock`, which `function` uses: cannot pickle '_thread.lock' object"
    """
    name = _name(fn)
    named = [(f"`{label}`, which `{name}` uses", value) for label, value in _uses(fn)]
    for label, value in [*named, *((f"args[{i}]", value) for i, value in enumerate(args))]:
        try:
            SendingPickler(io.BytesIO()).dump(value)
        except Exception as reason:
            return f"{label}: {reason}"
    return f"`{name}`: {error}"


def _uses(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The values that travel with a function, by name."""
    if isinstance(fn, functools.partial):
        yield from _uses(fn.func)
        yield from ((f"partial.args[{i}]", value) for i, value in enumerate(fn.args))
        yield from fn.keywords.items()
    elif inspect.ismethod(fn):
        yield "self", fn.__self__
        yield from _uses(fn.__func__)
    elif inspect.isfunction(fn):
        with contextlib.suppress(ValueError):  # one of its variables has no value yet
            found = inspect.getclosurevars(fn)
            yield from {**found.nonlocals, **found.globals}.items()


def _name(fn: Callable[..., Any]) -> str:
    return _name(fn.func) if isinstance(fn, functools.partial) else getattr(fn, "__name__", type(fn).__name__)


class _ReplyPickler(CallPickler):
    """Pickles what a function returns. Classes that came with the call are those of the caller, as they are there.

    By value, cloudpickle would give the caller's own class this process' methods and attributes.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and obj in _CAME_WITH_THE_CALL:
            return _class_of_caller, (_CAME_WITH_THE_CALL[obj],)
        return super().reducer_override(obj)


# What cloudpickle calls them in both processes.
_CAME_WITH_THE_CALL: dict[type, str] = {}


def _class_of_caller(name: str) -> type:
    return cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[name]


def _code(filename: str, *parts: Any) -> CodeType:
    return CodeType(*parts).replace(co_filename=filename)


def write_call(
    path: Path,
    fn: Callable[..., Any],
    args: Sequence[Any],
    devices: int = 1,
    quiet: bool = False,
    pickler: type[CallPickler] = CallPickler,
) -> None:
    """Writes what the processes of `call_command` run.

    Args:
        path: the file.
        fn: any function.
        args: its arguments.
        devices: number of logical CPU devices of each process.
        quiet: whether the caller shows exceptions itself; the processes then print RAISED in front of them.
        pickler: pickles the function and its arguments.

    Raises:
        Exception: whatever the pickler raises about something that cannot travel.
    """
    # Functions of the parent's modules travel by name: they are looked for where the parent found them.
    setup = {"path": list(sys.path), "argv": list(sys.argv), "sources": _sources(), "devices": devices, "quiet": quiet}
    with path.open("wb") as file:
        pickle.dump(setup, file)
        pickle.dump(_registered(pickler), file)
        pickler(file).dump((fn, tuple(args)))


def call_command(call: Path, result: Path, cpus: Sequence[int] = (), returns: bool = True) -> tuple[str, ...]:
    """The argument vector of a process that runs a call.

    Args:
        call: written by `write_call`.
        result: to be read by `read_outcome`.
        cpus: cores that it pins itself to; empty = it is not pinned.
        returns: whether anybody wants what the function returns there.
    """
    pinned = ",".join(map(str, cpus))
    return (sys.executable, CHILD, str(call), str(result), pinned, "returns" if returns else "ends")


def read_outcome(path: Path) -> Outcome | None:
    """How a call ended; None if the process died before it could say so.

    A value that cannot be read in this process counts as a failure.
    """
    if not path.exists():
        return None
    moment, succeeded, printed, value = pickle.loads(path.read_bytes())
    try:
        return Outcome(moment, succeeded, pickle.loads(value), printed)
    except Exception as error:
        text = f"What the function returned cannot be read here ({type(error).__name__}: {error}). {_ADVICE}."
        if not succeeded and printed.strip():
            text = printed.strip().splitlines()[-1]  # an exception of a class that is not here
        return Outcome(moment, False, RuntimeError(text), printed)


def run_call(file: BinaryIO, setup: dict[str, Any], result: str, returns: bool) -> int:
    """Runs a call in this process, one of `call_command`, and writes its outcome; returns the exit code.

    Args:
        file: the file of the call, behind its setup.
        setup: what was in front.
        result: file for the outcome.
        returns: whether anybody wants what the function returns.
    """
    printed = ""
    try:
        _prepare(file, setup)
        fn, args = pickle.load(file)
        file.close()
        _CAME_WITH_THE_CALL.update(cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS)
        value = fn(*args)
        succeeded, code = True, 0
        value = value if returns or _is_in_parts(value) else None
    except BaseException as error:
        succeeded, value = False, error
        # As Python does when an exception ends a script: exit handlers look for it, and wait for nobody.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        code = error.code if isinstance(error, SystemExit) else getattr(error, "_tfdist_exit_code", 1)
        code = code if isinstance(code, int) and code else 1
        printed = _below_the_call(error)
        print(*[RAISED] * setup["quiet"], printed, sep="\n", end="", file=sys.stderr, flush=True)
    # The time before pickling: a large model takes a while.
    moment = time.time()
    try:
        data = _dump(value, _ReplyPickler)
        data = data if returns or not succeeded else pickle.dumps(None)
        if not succeeded:
            pickle.loads(data)  # what an exception's __init__ asks for may not be in its args
    except Exception as error:
        if succeeded:
            text = f"The {type(value).__name__} that the function returned could not be pickled: {error}. {_ADVICE}."
            succeeded, code, printed = False, 1, f"RuntimeError: {text}\n"
            print(printed, end="", file=sys.stderr, flush=True)
        else:
            text = "".join(traceback.format_exception_only(value)).strip()
        data = pickle.dumps(RuntimeError(text))
    write_atomically(result, pickle.dumps((moment, succeeded, printed, data)))
    jobs = sys.modules.get("tfdist.runtime.job")
    if succeeded and jobs is not None and jobs.joined() is not None:
        jobs.joined().leave()
    return code


def _is_in_parts(value: Any) -> bool:
    """Whether it is a model of which each process has a part: all pickle it together."""
    keras, state = sys.modules.get("keras"), sys.modules.get("tfdist.inspection.model_state")
    is_model = keras is not None and state is not None and isinstance(value, keras.Model)
    return is_model and any(map(state.is_sharded, value.variables))


def _sources() -> dict[str, list[str]]:
    """The lines of what was compiled without a file, such as the cells of a notebook, by its name.

    Tracebacks quote them, and tf.function converts loops and conditions from their text.
    """
    entries = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    return {name: list(entry[2]) for name, entry in entries.items() if not os.path.exists(name)}


def _registered(pickler: type[CallPickler]) -> dict[str, bytes]:
    """What notebook or script have registered as serializable by Keras: files name it by what it is registered as."""
    keras = sys.modules.get("keras")
    found = {}
    for name, thing in (keras.saving.get_custom_objects() if keras else {}).items():
        if getattr(thing, "__module__", "") == "__main__":
            try:
                found[name] = _dump(thing, pickler)
            except Exception:
                continue  # whoever needs it will hear of it
    return found


def _prepare(file: BinaryIO, setup: dict[str, Any]) -> None:
    for name, lines in setup["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    if registered := pickle.load(file):
        import keras

        for name, data in registered.items():
            package, arrow, own = name.partition(">")
            if arrow:
                keras.saving.register_keras_serializable(package, own)(pickle.loads(data))
            else:
                keras.saving.get_custom_objects()[name] = pickle.loads(data)
    if setup["devices"] > 1:
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * setup["devices"])


def _below_the_call(error: BaseException) -> str:
    """An exception as Python prints it, without the frames of this file, which are above the function."""
    below = error.__traceback__
    while below is not None and below.tb_frame.f_code.co_filename == __file__:
        below = below.tb_next
    # Where the function could not even be read, there is nothing below.
    return "".join(traceback.format_exception(type(error), error, below))


def _dump(value: Any, pickler: type[CallPickler] = CallPickler) -> bytes:
    file = io.BytesIO()
    pickler(file).dump(value)
    return file.getvalue()
