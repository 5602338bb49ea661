"""A pytest plugin: Keras' own tests run in the scope of one strategy, and their outcomes are noted.

Given by environment variables: `CONFORMANCE_STRATEGY`, a key of `STRATEGIES`, and `CONFORMANCE_OUTCOMES`, the file
that a line of JSON is written to for each test: `{"test": ..., "outcome": "passed", "failed" or "skipped", "reason":
...}`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

DEVICES = ["CPU:0", "CPU:1"]
KERAS_DISTRIBUTION = "keras.distribution"


def _stock() -> Any:
    import tensorflow as tf

    return tf.distribute.MirroredStrategy(DEVICES)


def _mirrored() -> Any:
    import tfdist

    return tfdist.MirroredStrategy(DEVICES)


def _multi_worker() -> Any:
    import tfdist

    return tfdist.MultiWorkerMirroredStrategy()


def _pipeline() -> Any:
    import tfdist

    return tfdist.PipelineStrategy(DEVICES, num_microbatches=2)


def _horovod() -> Any:
    import tfdist

    return tfdist.HorovodStrategy()


def _keras_distribution() -> None:
    import tfdist

    tfdist.keras_distribution.enable()


# All on two devices of one process; Horovod has one for each process. Keras' tests of keras.distribution want more.
STRATEGIES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "tf.distribute's Mirrored": _stock,
    "Mirrored": _mirrored,
    "MultiWorker": _multi_worker,
    "Pipeline": _pipeline,
    "Horovod": _horovod,
    KERAS_DISTRIBUTION: _keras_distribution,
}


class InScope:
    """Opens the scope around each test, and notes how the test ended."""

    def __init__(self, strategy: Any, outcomes: str):
        self._strategy, self._outcomes = strategy, outcomes

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if os.environ["CONFORMANCE_STRATEGY"] == KERAS_DISTRIBUTION:
            # "Only JAX has the proper backend distribution lib."
            for node in item.listchain():
                node.own_markers = [mark for mark in node.own_markers if mark.name != "skipif"]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[Any]:
        if self._strategy is None:
            return (yield)
        import tensorflow as tf
        from keras.src.testing.test_case import TestCase

        with contextlib.ExitStack() as stack:
            # Tests of strategies make one of their own.
            stack.enter_context(mock.patch.object(tf.distribute, "MirroredStrategy", lambda *_, **__: self._strategy))
            if "distribute_test" not in item.path.name:
                # After it: Keras' setUp clears the session, and with it every open scope.
                stack.enter_context(mock.patch.object(TestCase, "setUp", _and_then_opens(TestCase.setUp, self._open)))
            return (yield)

    def _open(self, test: unittest.TestCase) -> None:
        scope = contextlib.ExitStack()
        scope.enter_context(self._strategy.scope())
        test.addCleanup(scope.close)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[Any]:
        report = yield
        if report.when == "call" or report.outcome != "passed":
            reason = "" if call.excinfo is None else call.excinfo.exconly()
            line = {"test": item.nodeid.split("/")[-1], "outcome": report.outcome, "reason": reason[:2000]}
            with open(self._outcomes, "a") as file:
                print(json.dumps(line), file=file)
        return report


def _and_then_opens(set_up: Callable, open_scope: Callable) -> Callable:
    @functools.wraps(set_up)
    def and_then_opens(test: unittest.TestCase) -> None:
        set_up(test)
        open_scope(test)

    return and_then_opens


def _conftest() -> types.ModuleType:
    """What Keras' tests import from the conftest.py of its repository, which is not installed."""
    module = types.ModuleType("conftest")
    module.skip_if_backend = lambda backend, reason: pytest.mark.skipif(backend == "tensorflow", reason=reason)
    return module


def pytest_configure(config: pytest.Config) -> None:
    import tensorflow as tf

    name = os.environ["CONFORMANCE_STRATEGY"]
    count = 8 if name == KERAS_DISTRIBUTION else len(DEVICES)
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
    sys.modules.setdefault("conftest", _conftest())
    strategy = STRATEGIES[name]()
    config.pluginmanager.register(InScope(strategy, os.environ["CONFORMANCE_OUTCOMES"]))
