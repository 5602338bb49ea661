"""Which files a process writes."""

from __future__ import annotations

import os
import sys

import keras


class Writes:
    """Notes which files below a folder this process opens for writing."""

    def __init__(self, folder: str):
        import h5py

        self._folder = folder
        self.paths: list[str] = []
        sys.addaudithook(self._audit)
        archive = type(keras.export.ExportArchive())
        note, write_out = self._note, archive.write_out

        class File(h5py.File):
            def __init__(self, name: object, mode: str = "r", **arguments: object):
                if mode != "r":
                    note(name)
                super().__init__(name, mode, **arguments)

        def noted_write_out(self: object, filepath: object, *arguments: object, **more: object) -> None:
            note(filepath)
            write_out(self, filepath, *arguments, **more)

        h5py.File, archive.write_out = File, noted_write_out

    def _audit(self, event: str, arguments: tuple) -> None:
        if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            self._note(arguments[0])

    def _note(self, path: object) -> None:
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._folder):
            self.paths.append(os.path.relpath(path, self._folder))
