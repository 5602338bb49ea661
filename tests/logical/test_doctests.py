"""The examples in docstrings do what they say."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
import tensorflow as tf

import tfdist
from tests.tiers import daily
from tfdist.compat.upstream import framework_config

FOLDER = Path(tfdist.__file__).parent
# Modules of which some examples (`# doctest: +SKIP`) cannot run here, with what they need.
SKIPPED = {
    "checkpoint.store": "changes how this process ends",
    "launcher.drill.drill": "a launcher that is killed several times",
    "launcher.drill.faults": "a launcher that is killed",
    "launcher.local.fork_server": "this process would fork those of later tests from the example's server",
    "launcher.process": "a worker's plan",
    "launcher.supervisor": "workers to watch",
    "strategies.local_steps.strategy": "a process with one device",
    "runtime.job": "changes how this process ends",
    "runtime.servers": "a cluster",
    "strategies.parameter_server.dispatcher": "a cluster",
    "strategies.parameter_server.runner": "a cluster",
    "strategies.parameter_server.strategy": "a cluster",
    "strategies.parameter_server.data": "a cluster",
    "tuning.tune_run": "a script that searches",
}
# The first one measures this machine; the others take seconds, and other tests of `make test` do what they do.
SLOW = (
    *("callbacks.tensorboard", "memory.budget"),
    *("optimizers.sharded_optimizer", "strategies.multi_worker", "testing.transparency"),
)


def sources() -> dict[str, str]:
    """The modules with examples, without `tfdist.`, and their texts."""
    files = {".".join(path.relative_to(FOLDER).with_suffix("").parts): path for path in sorted(FOLDER.rglob("*.py"))}
    texts = {name.removesuffix(".__init__"): path.read_text() for name, path in files.items()}
    return {name: text for name, text in texts.items() if ">>>" in text}


MODULES = sources()


@pytest.fixture
def unseeded():
    """Neither the tests before nor those after an example are under its seed, or have to be deterministic."""
    tf.random.set_seed(None)
    yield
    tf.random.set_seed(None)
    framework_config.disable_op_determinism()


@pytest.mark.parametrize("name", daily(MODULES, *(MODULES.keys() - set(SLOW))))
def test_examples(name, tmp_path, monkeypatch, four_devices, unseeded):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = doctest.testmod(importlib.import_module(f"tfdist.{name}"))
    assert (result.attempted > 0 or name in SKIPPED, result.failed) == (True, 0)


def test_every_example_that_is_skipped_has_a_reason():
    assert {name for name, text in MODULES.items() if "doctest: +SKIP" in text} == SKIPPED.keys()


def test_all_examples_are_found():
    finder = doctest.DocTestFinder()
    found = {
        name: sum(len(test.examples) for test in finder.find(importlib.import_module(f"tfdist.{name}")))
        for name in MODULES
    }
    written = {name: sum(line.lstrip().startswith(">>>") for line in MODULES[name].splitlines()) for name in MODULES}
    assert found == written
