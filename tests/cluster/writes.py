"""Which files a process writes."""

from __future__ import annotations

import os
import sys


class Writes:
    """Notes which files below a folder this process opens for writing."""

    def __init__(self, folder: str):
        import h5py
        from tensorflow.python.saved_model import save as saved_model

        self._folder = folder
        self.paths: list[str] = []
        sys.addaudithook(self._audit)
        note, save = self._note, saved_model.save_and_return_nodes

        class File(h5py.File):
            def __init__(self, name: object, mode: str = "r", **arguments: object):
                if mode != "r":
                    note(name)
                super().__init__(name, mode, **arguments)

        def noted_save(what: object, path: object, *arguments: object, **more: object) -> object:
            note(path)
            return save(what, path, *arguments, **more)

        h5py.File, saved_model.save_and_return_nodes = File, noted_save

    def _audit(self, event: str, arguments: tuple) -> None:
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self._note(arguments[0])

    def _note(self, path: object) -> None:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._folder):
            self.paths.append(os.path.relpath(path, self._folder))
