"""How tfdist replaces a private function of TensorFlow or Keras: once, if it exists; untested versions are warned of.

Each patch names the upstream issue that would make it unnecessary, and has a test in `tests/compat/` that fails once
upstream behaves without it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# First and last version (major.minor) with which the patches were tested.
TESTED = {
    "tensorflow": ("2.20", "2.21"),
    "keras": ("3.12", "3.15"),
    "keras_hub": ("0.25", "0.32"),
    "keras_tuner": ("1.4", "1.4"),
    "tensorflow_datasets": ("4.9", "4.9"),
}

_log = logging.getLogger("tfdist")
_warned: set[str] = set()


@dataclasses.dataclass(frozen=True)
class Patch:
    """One replaced function.

    Attributes:
        target: "module:attribute" or "module:Class.attribute".
        make: receives the original function and returns its replacement, which must fall back on the original where
            no tfdist strategy is involved. For a method that upstream's class lacks: receives `None`.
        package: that the function belongs to, a key of `TESTED`.
        upstream: the upstream issue, or the reason why there is none.
        is_new: whether the class has no such method of its own yet.
    """

    target: str
    make: Callable[[Callable | None], Callable]
    package: str
    upstream: str
    is_new: bool = False

    def install(self) -> None:
        """Puts the replacement in place, once.

        Raises:
            RuntimeError: if the function is not there in the installed version of the package.
        """
        module_name, _, path = self.target.partition(":")
        *parents, name = path.split(".")
        try:
            owner: Any = importlib.import_module(module_name)
            for parent in parents:
                owner = getattr(owner, parent)
            original = owner.__dict__.get(name) if self.is_new else owner.__dict__[name]
        except (ImportError, AttributeError, KeyError):
            raise RuntimeError(
                f"tfdist changes {self.target} ({self.upstream}), which {self.package} {_version(self.package)} does "
                f"not have. Expected: {self.package} {' to '.join(TESTED[self.package])}. "
                f"Install one of these, or a newer tfdist."
            ) from None
        if hasattr(original, "_tfdist_original"):
            return
        self._warn_if_untested()
        replacement = self.make(original)
        replacement._tfdist_original = original
        setattr(owner, name, replacement)

    def current(self) -> Any:
        """What is in its place; `None` if there is nothing."""
        module_name, _, path = self.target.partition(":")
        found: Any = importlib.import_module(module_name)
        for name in path.split("."):
            found = getattr(found, name, None) if self.is_new else getattr(found, name)
        return found

    def original(self) -> Callable | None:
        """The function as upstream wrote it; `None` if there is none."""
        found = self.current()
        return getattr(found, "_tfdist_original", found)

    def _warn_if_untested(self) -> None:
        version = _version(self.package)
        first, last = (_numbers(bound) for bound in TESTED[self.package])
        if not first <= _numbers(version)[:2] <= last and self.package not in _warned:
            _warned.add(self.package)
            _log.warning(
                "tfdist was tested with %s %s to %s; this is %s. If training misbehaves, install a tested version.",
                self.package,
                *TESTED[self.package],
                version,
            )


def owner(public: type, method: str) -> type:
    """The class from which a public class inherits a method. Keras 3.16 gives its private classes other names.

    What others have set on the public class itself, as some loggers do, is not asked.

    Example:
        >>> import keras
        >>> owner(type("Mine", (keras.Model,), {}), "export").__name__
        'Model'
    """
    return next((parent for parent in public.__mro__[1:] if method in vars(parent)), public)


def inherited(public: type, method: str) -> str:
    """The target of a method that a public class inherits.

    Example:
        >>> import keras
        >>> inherited(type("Mine", (keras.Model,), {}), "export")
        'keras.src.models.model:Model.export'
    """
    found = owner(public, method)
    return f"{found.__module__}:{found.__qualname__}.{method}"


def _version(package: str) -> str:
    # Not that of a distribution: keras-nightly installs `keras`, too.
    return importlib.import_module(package).__version__


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def after_import(package: str, change: Callable[[], None]) -> None:
    """Calls a function once a package is imported; at once, if it is.

    Args:
        package: its name, without a dot.
        change: called without arguments.
    """
    if package in sys.modules:
        change()
    else:
        sys.meta_path.insert(0, _Importer(package, change))


class _Importer:
    """Imports a package as the import system would, and changes it then."""

    def __init__(self, package: str, change: Callable[[], None]) -> None:
        self._package, self._change = package, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Knows one package, which a program may look for without importing it."""
        if fullname != self._package:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._change()

        spec.loader.exec_module = exec_module
        return spec
