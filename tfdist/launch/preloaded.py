"""Modules that were imported before a script began, kept out of its sight until it imports them itself.

A script may set variables such as `TF_ENABLE_ONEDNN_OPTS` before its `import tensorflow`. In a process that imported
TensorFlow beforehand they would come too late, and the training would go on with other numbers than it began with.
So the first import decides: with unchanged variables it hands out what is there, otherwise the process starts over
without anything preloaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from tfdist.launch.import_settings import changed_for_import

# TensorFlow and Keras import each other, and both import NumPy.
PACKAGES = ("numpy", "tensorflow", "keras")


class PreloadedModules(MetaPathFinder, Loader):
    """Takes the packages out of `sys.modules` and puts them back when they are imported.

    Args:
        start_over: called instead when the environment has changed; must not return.

    Example:
        >>> PreloadedModules(start_over).hide()
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
        """None: what is made by default is replaced at once."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the package back, with all that importing it would have imported as well."""
        if changed_for_import(self._env, os.environ):
            self._start_over()
        for package in ("numpy",) if module.__name__ == "numpy" else PACKAGES:
            # Over the empty module that the import system has just made: it hands out what is registered here.
            sys.modules.update(self._hidden.pop(package, {}))
        if not self._hidden:
            sys.meta_path.remove(self)
