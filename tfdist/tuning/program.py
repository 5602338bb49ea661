"""`python -m tfdist.tuning.program SCRIPT ...` runs a script as a process of a search.

It does what `python SCRIPT ...` does, and changes KerasTuner when the script imports it.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from tfdist.launcher.warm.preloaded import first_path, run_as_main
from tfdist.tuning.member import Member

_PACKAGE = "keras_tuner"


class _Importer:
    """Imports KerasTuner as the import system would, and changes it then.

    Args:
        member: this process.
    """

    def __init__(self, member: Member) -> None:
        self._member = member

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Knows one package, once."""
        if fullname != _PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            from tfdist.tuning.patches import install

            install(self._member)

        spec.loader.exec_module = exec_module
        return spec


def main(words: Sequence[str]) -> None:
    """Runs `python WORDS`."""
    member = Member.of_process(os.environ)
    if member is None:
        raise SystemExit("tfdist: this program is started by `tfdist tune`")
    sys.meta_path.insert(0, _Importer(member))
    sys.path[0] = first_path(words)
    own = [__file__, "<frozen runpy>", str(runpy.__file__)]
    run_as_main(words, (sys.executable, "-u", *words), hidden_files=own)


if __name__ == "__main__":
    main(sys.argv[1:])
