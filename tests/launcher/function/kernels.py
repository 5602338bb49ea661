"""Notebooks, run as Jupyter runs them, and kernels that can be interrupted and killed."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import start_new_kernel
from nbclient import NotebookClient

from tests.processes import MARK, marked

SECONDS = 240


def notebook(cells: Sequence[str]) -> nbformat.NotebookNode:
    """A notebook with these cells of code."""
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def execute(notebook: nbformat.NotebookNode, folder: Path, coalesce: bool = True) -> list[nbformat.NotebookNode]:
    """Runs a notebook and returns its cells of code, with their outputs; after a failure it goes on."""
    resources = {"metadata": {"path": str(folder)}}
    options: dict[str, Any] = {"timeout": SECONDS, "allow_errors": True, "coalesce_streams": coalesce}
    NotebookClient(notebook, kernel_name="python3", resources=resources, **options).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(cell: nbformat.NotebookNode) -> str:
    """What a cell has printed, as a browser shows it, without colours."""
    text = "".join(output["text"] for output in cell.outputs if output.get("name") == "stdout")
    return re.sub(r"\x1b\[[0-9;]*m", "", re.sub(r".*\r(?=[^\n])", "", text))


def error(cell: nbformat.NotebookNode) -> str:
    """Name and message of the exception that a cell has raised; empty if it has raised none."""
    return "\n".join(f"{o['ename']}: {o['evalue']}" for o in cell.outputs if o["output_type"] == "error")


class Kernel:
    """A running kernel; all processes below it carry a mark."""

    def __init__(self, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        env = {**os.environ, MARK: self._mark}
        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder), env=env)

    @property
    def pid(self) -> int:
        return self.manager.provisioner.pid

    def run(self, code: str) -> str:
        """Runs code to its end; returns the name of the exception, empty without one."""
        return self.answer(self.client.execute(code))

    def answer(self, message: str) -> str:
        """The same for code that runs already."""
        while (reply := self.client.get_shell_msg(timeout=60))["parent_header"].get("msg_id") != message:
            pass
        return reply["content"].get("ename", "")

    def marked(self) -> set[int]:
        """The living processes besides the kernel."""
        return set(marked(MARK, self._mark)) - {self.pid}


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """Starts a kernel, and ends it."""
    started = Kernel(folder)
    try:
        yield started
    finally:
        started.client.stop_channels()
        started.manager.shutdown_kernel(now=True)
