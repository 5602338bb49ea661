"""Prints the files of tfdist that one `fit` of one epoch goes through on rank 0 of two: `python tools/fit_files.py`.

Counted are the functions that run, in every thread, from the call of `fit` to its return: tracing, progress and signals
included, the making of strategy and model not.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).resolve().parent.parent / "tfdist"


@contextmanager
def noted_files() -> Iterator[set[str]]:
    """Within the block, collects the files of tfdist whose functions are called, as paths in the package."""
    codes: set[Any] = set()
    files: set[str] = set()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        paths = [Path(code.co_filename) for code in codes if code.co_name != "<module>"]
        files |= {path.relative_to(_PACKAGE).as_posix() for path in paths if _PACKAGE in path.parents}


def files_of_fit(strategy: Any = None) -> list[str]:
    """The files that a `fit` goes through in this process; by default under MultiWorkerMirroredStrategy."""
    import keras
    import numpy as np

    import tfdist

    strategy = strategy or tfdist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    with noted_files() as files:
        model.fit(np.ones((16, 4)), np.ones((16, 1)), batch_size=8, verbose=0)
    return sorted(files)


def main() -> None:
    from tfdist.testing import run_local

    files = run_local(files_of_fit, 2)[0]
    print(*files, f"{len(files)} files", sep="\n")


if __name__ == "__main__":
    main()
