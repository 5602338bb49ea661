"""Running a program as the interpreter does, in a process that has done something else before."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from collections.abc import Collection, Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType, TracebackType


def first_path(words: Sequence[str]) -> str:
    """What `python WORDS` puts at the beginning of `sys.path`.

    Args:
        words: a script or -m and a module, and its arguments.

    Example:
        >>> first_path(("/tmp/train.py", "--epochs", "3"))
        '/tmp'
    """
    return os.getcwd() if words[0] == "-m" else os.path.dirname(os.path.realpath(words[0]))


def run_as_main(words: Sequence[str], command: Sequence[str], hidden_files: Collection[str]) -> None:
    """Does what `python WORDS` does; exceptions pass through to the interpreter, which ends the process accordingly.

    Args:
        words: a script or -m and a module, and its arguments.
        command: the whole argument vector, for `sys.orig_argv`.
        hidden_files: files of the callers, which do not belong into a traceback.
    """
    sys.argv[:] = words if words[0] != "-m" else ["-m", *words[2:]]
    sys.orig_argv[:] = command
    hidden = {*hidden_files, __file__}

    def print_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename in hidden:
            traceback = traceback.tb_next
        sys.__excepthook__(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = print_exception
    sys.modules["__main__"] = main = ModuleType("__main__")
    names = vars(main)
    names.update(__annotations__={}, __builtins__=builtins)
    if words[0] == "-m":
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    path = os.path.abspath(words[0])
    names.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), names)
