"""Runs the programs of pages, each page in a process that is forked from one with TensorFlow imported.

On stdin is JSON, one object a page: {"page": …, "folder": …, "devices": 2, "given": code, "blocks": [[line, text,
output or null], …]}. Programs of a page share their names, as in a notebook. On stdout is JSON: what is wrong with each
page, as [page, error].
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import signal
import sys
import traceback
from typing import Any

import tensorflow as tf

import tfdist
from tfdist.compat import patches

# Imported for the processes to come.
PRELOADED = (tfdist.MultiWorkerMirroredStrategy, tfdist.callbacks.BackupAndRestore, patches())
SECONDS = 200


def run(page: dict[str, Any]) -> str:
    """Runs a page's programs one after the other; returns what is wrong, or nothing."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * page["devices"])
    exec(page["given"], names)
    for line, text, expected in page["blocks"]:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (line - 1) + text, page["page"], "exec"), names)
        except Exception:
            return traceback.format_exc()
        if expected is not None and printed.getvalue() != expected:
            return f"{page['page']}:{line} printed\n{printed.getvalue()}instead of\n{expected}"
    return ""


def _run_in_child(page: dict[str, Any], answer: Any) -> None:
    # Whatever becomes of the parent and of the tests, the process does not outlive this.
    signal.alarm(SECONDS)
    os.chdir(page["folder"])
    # What programs write to file descriptors is no answer.
    os.dup2(2, 1)
    answer.send(run(page))
    answer.close()


def main() -> None:
    """Runs all pages, one after the other."""
    results = []
    context = multiprocessing.get_context("fork")
    for page in json.load(sys.stdin):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_run_in_child, args=(page, there))
        process.start()
        there.close()
        try:
            error = here.recv()
        except EOFError:
            error = "the process ended without a word"
        process.join()
        results.append([page["page"], error or (process.exitcode and f"exit code {process.exitcode}") or ""])
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
