"""Running a script in a process that has imported TensorFlow before, as if it had not.

A script may set variables such as `TF_ENABLE_ONEDNN_OPTS` before its `import tensorflow`. In a process that imported
TensorFlow beforehand they would come too late, and the training would go on with other numbers than it began with.
So the modules are hidden from the script, and its first import decides: with unchanged variables it gets what is there,
otherwise the process starts over without anything preloaded.
"""

from __future__ import annotations

import builtins
import io
import os
import runpy
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType, TracebackType

# What the launcher gives to each process of a run, and to the processes of a smaller group after a restart. All are
# read when the devices are set up, but OMP_NUM_THREADS, which NumPy's BLAS reads when it is loaded (zygote_program.py).
_OF_ONE_PROCESS = frozenset(
    {"TF_CONFIG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"}
)
_OWN_PREFIX = "TFDIST_"

# What importing TensorFlow, Keras or NumPy can depend on, as far as a running script can still change it.
_IMPORT_PREFIXES = (
    "TF", "XLA_", "KERAS_", "ONEDNN_", "DNNL_", "CUDA_", "NVIDIA_", "NCCL_", "ROCM_", "HIP_", "TPU_", "JAX_",
    "OMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "NPY_", "NUMPY_", "GRPC_", "PROTOCOL_BUFFERS_",
)  # fmt: skip
# Of these: read late, or without effect on anything but the messages.
_LATE_IN_SCRIPTS = (_OF_ONE_PROCESS - {"OMP_NUM_THREADS"}) | {
    "CUDA_DEVICE_ORDER",
    "TF_CPP_MIN_LOG_LEVEL",
    "TF_FORCE_GPU_ALLOW_GROWTH",
}
# A script that sets a variable to its default gets what it would get anyway.
_DEFAULTS = {"KERAS_BACKEND": "tensorflow"}
# TensorFlow and Keras import each other, and both import NumPy.
PACKAGES = ("numpy", "tensorflow", "keras")


def shared_part(env: Mapping[str, str]) -> dict[str, str]:
    """The part of a worker's environment that all workers of a run must have in common to be forked from one process.

    Example:
        >>> shared_part({"TF_CONFIG": "{}", "TFDIST_RESTART": "1", "HOME": "/"})
        {'HOME': '/'}
    """
    return {
        name: value for name, value in env.items() if name not in _OF_ONE_PROCESS and not name.startswith(_OWN_PREFIX)
    }


def changed_for_import(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Names of the variables with which importing TensorFlow could give something else than it gave before.

    Example:
        >>> changed_for_import({"TF_ENABLE_ONEDNN_OPTS": "1"}, {"TF_ENABLE_ONEDNN_OPTS": "0", "WANDB_MODE": "offline"})
        ['TF_ENABLE_ONEDNN_OPTS']
    """
    return sorted(
        name
        for name in {*before, *after}
        if name.startswith(_IMPORT_PREFIXES)
        and not name.startswith(_OWN_PREFIX)
        and name not in _LATE_IN_SCRIPTS
        and before.get(name, _DEFAULTS.get(name)) != after.get(name, _DEFAULTS.get(name))
    )


class PreloadedModules(MetaPathFinder, Loader):
    """Takes the packages out of `sys.modules` and puts them back when they are imported.

    Args:
        start_over: called instead when the environment has changed; must not return.

    Example:
        >>> PreloadedModules(start_over).hide()  # doctest: +SKIP
    """

    def __init__(self, start_over: Callable[[], object]) -> None:
        self._start_over = start_over
        self._hidden: dict[str, dict[str, ModuleType]] = {}
        self._env: Mapping[str, str] = {}

    def hide(self) -> None:
        """From now on the packages look as if they had not been imported in this environment."""
        self._env = dict(os.environ)
        self._hidden = {package: {} for package in PACKAGES if package in sys.modules}
        for name in list(sys.modules):
            package = name.partition(".")[0]
            if package in self._hidden:
                self._hidden[package][name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Knows the hidden packages only."""
        return ModuleSpec(fullname, self) if fullname in self._hidden else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """None: the import system makes an empty module, which `exec_module` replaces."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the package back, with all that importing it would have imported as well."""
        if changed_for_import(self._env, os.environ):
            self._start_over()
        for package in ("numpy",) if module.__name__ == "numpy" else PACKAGES:
            # This replaces the empty module that the import system has just made: it hands out what is registered here.
            sys.modules.update(self._hidden.pop(package, {}))
        if not self._hidden:
            sys.meta_path.remove(self)


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
    sys.excepthook = _hook({*hidden_files, __file__})
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


def _hook(hidden_files: Collection[str]) -> Callable[..., None]:
    def print_exception(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_code.co_filename in hidden_files:
            traceback = traceback.tb_next
        sys.__excepthook__(kind, error.with_traceback(traceback), traceback)

    return print_exception
